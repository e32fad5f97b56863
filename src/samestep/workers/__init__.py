"""Processes and messages; knows no tower."""
