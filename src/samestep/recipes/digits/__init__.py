"""Handwritten digits of 8×8 pixels."""
