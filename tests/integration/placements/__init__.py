"""Small training runs that return the same text on every placement, and faults that end in one error."""

from . import checkpoints, data, faults, layers, losses, runs, sparse, whole_batch  # noqa: F401 - each notes its own
from .scenario import FAULTS, SCENARIOS

__all__ = ["FAULTS", "SCENARIOS"]
