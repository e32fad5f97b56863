"""Training speed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Throughput"]


@dataclass
class Throughput:
    """Rows per second and seconds per batch since `read`, in wall time of training.

    The wait for input counts, and evaluations and checkpoints between steps do not.

    Attributes:
        rows: rows since the last `read`.
        batches: batches since the last `read`.
        since_s: time of the last `read`, by `time.perf_counter`, later by what was left out.
    """

    rows: int = 0
    batches: int = 0
    since_s: float = field(default_factory=time.perf_counter)

    def add(self, rows: int) -> None:
        """Count one more batch."""
        self.rows += rows
        self.batches += 1

    def leave_out(self, seconds: float) -> None:
        """Leave out time in which no step ran."""
        self.since_s += seconds

    def read(self) -> tuple[float, float]:
        """Return rows per second and seconds per batch, and reset the counts."""
        now = time.perf_counter()
        elapsed_s = now - self.since_s
        rates = self.rows / elapsed_s, elapsed_s / max(1, self.batches)
        self.rows, self.batches, self.since_s = 0, 0, now
        return rates
