"""Which worker runs which towers: contiguous ranges, even or with given cuts. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from samestep.arguments import check_kind, whole
from samestep.errors import ConfigError

__all__ = ["Placement", "even_ranges"]

_MOST_TOWERS = 2**20


def even_ranges(length: int, num_ranges: int) -> list[range]:
    """Cut `range(length)` into contiguous ranges, as even as possible, the longer ones first.

    >>> even_ranges(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, longer = divmod(length, num_ranges)
    starts = [index * size + min(index, longer) for index in range(num_ranges + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@dataclass(frozen=True)
class Placement:
    """Which towers each worker runs: worker w runs `range(cuts[w], cuts[w + 1])`.

    Args:
        cuts: W + 1 increasing ints: 0, then the end of each worker's range; the last is T.

    Raises:
        ConfigError: invalid cuts, such as a worker without towers; or more than 2**20 towers.

    Example:
        >>> Placement.even(8, 3).towers(0), Placement((0, 1, 6, 8)).towers(1)
        (range(0, 3), range(1, 6))
        >>> Placement.even(8, 3).owner(5)
        1
    """

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_kind("cuts", self.cuts, Iterable, "the ends of the workers' ranges, such as (0, 3, 8)")
        object.__setattr__(self, "cuts", tuple(whole("a cut", cut) for cut in self.cuts))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or any(end <= start for start, end in pairwise(self.cuts)):
            raise ConfigError(
                f"cuts = {self.cuts}: expected 0, then one number for each worker, each above the one before "
                "(every worker runs at least one tower), and the number of towers last"
            )
        if self.num_towers > _MOST_TOWERS:
            raise ConfigError(
                f"towers = {self.num_towers}: expected at most {_MOST_TOWERS}, because a step lists them all"
            )

    @classmethod
    def even(cls, num_towers: int, num_workers: int) -> Placement:
        """Return the placement with ranges as even as possible, the longer ones first.

        Raises:
            ConfigError: not 1 <= W <= T.
        """
        num_towers = whole("towers", num_towers, 1)
        if not 1 <= num_workers <= num_towers:
            raise ConfigError(
                f"workers = {num_workers}: expected 1 <= workers <= towers = {num_towers}; "
                f"start at most {num_towers} workers, or ask for more towers"
            )
        return cls((0, *(towers.stop for towers in even_ranges(num_towers, num_workers))))

    @property
    def num_towers(self) -> int:
        """The number of towers, T."""
        return self.cuts[-1]

    @property
    def num_workers(self) -> int:
        """The number of workers, W."""
        return len(self.cuts) - 1

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Every worker's range of towers, in worker order."""
        return tuple(range(start, end) for start, end in pairwise(self.cuts))

    def towers(self, worker: int) -> range:
        """Return the contiguous range of towers that `worker` runs."""
        return self.ranges[worker]

    def rows(self, worker: int, num_rows: int) -> dict[int, range]:
        """Return each tower's rows of a batch, for the towers of `worker` that have rows.

        >>> Placement.even(4, 2).rows(1, num_rows=3)
        {2: range(2, 3)}
        """
        ranges = even_ranges(num_rows, self.num_towers)
        return {tower: ranges[tower] for tower in self.towers(worker) if ranges[tower]}

    def owner(self, tower: int) -> int:
        """Return the worker that runs `tower`."""
        assert 0 <= tower < self.num_towers
        return next(worker for worker, towers in enumerate(self.ranges) if tower in towers)
