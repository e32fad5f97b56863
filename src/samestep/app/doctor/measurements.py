"""The time and memory of a step on this machine, as text; no value counts as a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from samestep.app.doctor.measure import MEMORY_ROWS, MEMORY_TOWERS, PROGRAM
from samestep.app.doctor.runs import Fault, Runs
from samestep.errors import shown

__all__ = ["Measurements"]


class Measurements:
    """Measures the training step of a small net.

    Args:
        runs: runs the programs.
        device: as for `samestep.init`.
        num_workers: number of workers of the timed steps.
    """

    def __init__(self, runs: Runs, device: str, num_workers: int) -> None:
        self._runs = runs
        self._device = device
        self._num_workers = num_workers

    def __iter__(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield each measurement's name, and a function that returns the result or raises a `Fault`."""
        yield f"a step, and DistributedDataParallel's, on {self._num_workers} workers", self._speed
        yield f"memory of a step of {MEMORY_ROWS:,} rows", self._memory

    def _speed(self) -> str:
        rows = self._measure("speed", self._num_workers)
        return "medians" + "".join(f"\n  - {_speed_of(row)}" for row in rows)

    def _memory(self) -> str:
        found = self._measure("memory", 1)
        with_towers, at_once = (found[str(number)] / 1e6 for number in (MEMORY_TOWERS, 1))
        return f"{with_towers:.0f} MB with {MEMORY_TOWERS} towers, {at_once:.0f} MB as one batch"

    def _measure(self, what: str, num_workers: int) -> Any:
        printed = self._runs.start("-m", PROGRAM, what, self._device, num_workers).finish()
        try:
            return json.loads(printed.splitlines()[-1])
        except (ValueError, IndexError):
            raise Fault(f"it printed {shown(printed)} instead of measurements") from None


def _speed_of(row: Mapping[str, float]) -> str:
    text = (
        f"{row['towers']} towers: {row['ours_ms']:.1f} and {row['theirs_ms']:.1f} ms, "
        f"ratio {row['ratio']:.2f} (quartiles {row['low']:.2f}, {row['high']:.2f})"
    )
    if "our_syncs" in row:
        text += f", the host waits {row['our_syncs']} and {row['their_syncs']} times"
    return text
