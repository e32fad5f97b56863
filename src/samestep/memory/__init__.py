"""Shared memory between the workers of one host, and messages through it."""
