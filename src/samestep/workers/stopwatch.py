"""How long a device computes, with pauses in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time between each `start` and `stop`; of a GPU its own time, not that of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # starts and stops, alternating

    def start(self) -> None:
        """Go on, unless it runs."""
        if not self._is_running:
            self._marks.append(self._now())

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._is_running:
            self._marks.append(self._now())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still meanwhile."""
        was_running = self._is_running
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def read_ns(self) -> int:
        """Return the nanoseconds so far; 0 where a GPU has not come that far, because nobody waits for it."""
        self.stop()
        spans = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._device.type != "cuda":
            return sum(int(stop - start) for start, stop in spans)
        if not all(mark.query() for mark in self._marks):
            return 0
        return int(sum(start.elapsed_time(stop) for start, stop in spans) * 1e6)

    @property
    def _is_running(self) -> bool:
        return bool(len(self._marks) % 2)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))
