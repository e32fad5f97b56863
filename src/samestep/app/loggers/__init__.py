"""Loggers, which write a run's scalars and pictures."""
