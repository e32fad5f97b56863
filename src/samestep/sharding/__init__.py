"""Optimizers whose state and work are shared out among the workers."""
