"""Optimizers whose state and work are divided among the workers."""
