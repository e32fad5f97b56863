"""Processes and messages, independent of towers."""
