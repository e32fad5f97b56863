"""The placement of the next step: fixed by the program, or following the workers' speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from samestep.errors import ConfigError, shown
from samestep.summation.placement import Placement
from samestep.towers.pace import Pace
from samestep.workers.job import Job
from samestep.workers.stopwatch import Stopwatch

if TYPE_CHECKING:
    from samestep.towers.run import StepRun

__all__ = ["Placed", "Placing"]

Placed: TypeAlias = Placement | Literal["auto", "even"]
"""Which towers each worker runs, or how to choose them."""

_BYTES_PER_NS = 4  # a fast network; on a slower one, each subtree costs more than is assumed


class Placing:
    """Places the towers on the workers; see `Towers.placement`.

    Attributes:
        current: the placement of the next step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pace: Pace | None = None  # with placement="auto"
        self._stopwatch: Stopwatch | None = None  # of the last step

    def begin(self, num_towers: int) -> None:
        """Place the towers evenly on the job's current workers."""
        self.current = Placement.even(num_towers, self._job.world_size)
        self._stopwatch = None
        if self._pace is not None:
            self._pace.clear()

    @property
    def pass_ns(self) -> int:
        """How long this worker's passes of the last step took; 0 if unknown. Read it as late as possible."""
        return 0 if self._stopwatch is None else self._stopwatch.read_ns()

    def set(self, placement: Placed) -> None:
        """Set a placement, or how to choose it."""
        num_towers, num_workers = self.current.num_towers, self._job.world_size
        if placement == "auto":
            self._pace = Pace()
            return
        if placement == "even":
            placement = Placement.even(num_towers, num_workers)
        if not isinstance(placement, Placement):
            raise ConfigError(
                f"placement = {shown(placement)}: expected 'even', 'auto', or a samestep.Placement, such as "
                "Placement.even(8, 2) or Placement((0, 3, 8))"
            )
        if (placement.num_towers, placement.num_workers) != (num_towers, num_workers):
            raise ConfigError(
                f"placement has {placement.num_towers} towers on {placement.num_workers} workers: expected "
                f"{num_towers} on {num_workers}"
            )
        self.current, self._pace = placement, None

    def follow(self, run: StepRun) -> None:
        """Update the placement from the workers' speed, at the end of a step."""
        self._stopwatch = run.exchange.stopwatch
        if self._pace is not None and self._job.world_size > 1:
            rows_of = run.ranges  # by tower
            rows = [sum(len(rows_of[tower]) for tower in own) for own in run.plan.placement.ranges]
            subtree_ns = run.plan.num_bytes // _BYTES_PER_NS
            self.current = self._pace.follow(self.current, rows, run.exchange.pass_ns, subtree_ns)
