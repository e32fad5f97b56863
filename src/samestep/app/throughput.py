"""How fast training goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Throughput"]


@dataclass
class Throughput:
    """Rows and batches over wall time, input included, since it was last read.

    Attributes:
        rows: taken since then.
        batches: taken since then.
        since_s: when that was, on `time.perf_counter`.
    """

    rows: int = 0
    batches: int = 0
    since_s: float = field(default_factory=time.perf_counter)

    def add(self, rows: int) -> None:
        """Count one more batch."""
        self.rows += rows
        self.batches += 1

    def read(self) -> tuple[float, float]:
        """Return rows per second and seconds per batch, and start counting from zero again."""
        now = time.perf_counter()
        elapsed_s = now - self.since_s
        rates = self.rows / elapsed_s, elapsed_s / max(1, self.batches)
        self.rows, self.batches, self.since_s = 0, 0, now
        return rates
