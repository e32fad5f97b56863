"""Combines the buffers of all towers in a step: normalisation statistics, policies and counters."""
