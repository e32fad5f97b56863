"""Measures the time that a device computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time between each `start` and `stop`; for a GPU, time on the device, not on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # starts and stops, alternating

    def start(self) -> None:
        """Start, unless it is running."""
        if not self._is_running:
            self._marks.append(self._now())

    def stop(self) -> None:
        """Stop, if it is running."""
        if self._is_running:
            self._marks.append(self._now())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause during the block."""
        was_running = self._is_running
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def read_ns(self) -> int:
        """Stop, and return the nanoseconds; 0 if the GPU has not finished, because this does not wait."""
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
