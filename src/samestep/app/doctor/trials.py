"""Trials of samestep's guarantee: a small run on several numbers of workers, with workers killed, resumed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from samestep.app.doctor.runs import Fault, Run, Runs

__all__ = ["Trials"]

STEPS = 80
_ONE_KILLED_AFTER, _ALL_KILLED_AFTER = 5, 25
_CHECKPOINT_EVERY = 10
_SHOWN = 16
"""Number of digits of a digest to print, of 64."""

Trial = tuple[str, Callable[[], str]]


class Trials:
    """Trains a recipe several times, and compares the weights with those of the first run.

    Args:
        runs: runs the programs.
        recipe: the arguments of `samestep train`.
        device: as for `samestep.init`.
        num_devices: number of GPUs; runs have 1 to max(3, num_devices) workers.
    """

    def __init__(self, runs: Runs, recipe: Sequence[str], device: str, num_devices: int) -> None:
        self._runs = runs
        self._recipe = recipe
        self._device = device
        self._most = max(3, num_devices)
        self._towers = max(7, self._most)
        self._expected: str | None = None

    def __iter__(self) -> Iterator[Trial]:
        """Yield each trial's name, and a function that returns the result or raises a `Fault`."""
        for num_workers in range(1, self._most + 1):
            name = f"{self._towers} towers on {num_workers} worker{'s' * (num_workers > 1)}"
            yield name, partial(self._placed, num_workers)
        yield "3 workers, one killed", self._one_killed
        yield "2 workers, all killed, resumed on 1", self._all_killed

    def _placed(self, num_workers: int) -> str:
        return self._compare(self._start(num_workers, self._runs.folder()).finish())

    def _one_killed(self) -> str:
        run = self._start(3, self._runs.folder())
        run.reach(_ONE_KILLED_AFTER)
        with suppress(ProcessLookupError):  # the worker has just ended; the search below fails then
            os.kill(_workers_of(run)[0], signal.SIGKILL)
        same = self._compare(run.finish())
        found = re.search(r"going on with \d+ workers? after step \d+", run.stderr)
        if found is None:
            raise Fault("the other workers did not go on without it")
        return f"{found[0]}, {same}"

    def _all_killed(self) -> str:
        folder = self._runs.folder()
        run = self._start(2, folder)
        run.reach(_ALL_KILLED_AFTER)
        _workers_of(run)
        run.kill()
        resumed = self._start(1, folder).finish()
        first = re.search(r": step (\d+),", resumed)
        if first is None or int(first[1]) == 1:
            raise Fault("the run was not continued from a checkpoint")
        return f"continued with step {first[1]}, {self._compare(resumed)}"

    def _start(self, num_workers: int, folder: Path) -> Run:
        rows = 14 * self._towers + 5  # towers of different sizes
        what = ("--towers", self._towers, "--batch-size", rows, "--steps", STEPS)
        how = ("--workers", num_workers, "--device", self._device, "--log-every", 1)
        own = ("--run-dir", folder, "--checkpoint-every", _CHECKPOINT_EVERY)
        return self._runs.start("-m", "samestep", "train", *self._recipe, *what, *how, *own)

    def _compare(self, printed: str) -> str:
        found = re.search(r"^weights sha256 (\w{64})$", printed, re.M)
        if found is None:
            raise Fault("no digest of the weights was printed")
        if self._expected is None:
            self._expected = found[1]
            return f"weights sha256 {found[1][:_SHOWN]}... after {STEPS} steps"
        if found[1] != self._expected:
            raise Fault(f"different weights: sha256 {found[1][:_SHOWN]}..., not {self._expected[:_SHOWN]}...")
        return "the same weights"


def _workers_of(run: Run) -> list[int]:
    workers = run.workers()
    if not workers:
        raise Fault("no workers to kill: /proc shows none")
    return workers
