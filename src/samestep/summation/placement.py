"""Towers -> workers: contiguous ranges, as even as possible. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.errors import ConfigError

__all__ = ["Placement", "even_ranges"]


def even_ranges(length: int, parts: int) -> list[range]:
    """Cut `0..length-1` into `parts` contiguous ranges whose sizes differ by at most one.

    The longer ranges come first; ranges are empty where `length < parts`.

    >>> even_ranges(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, longer = divmod(length, parts)
    starts = [index * size + min(index, longer) for index in range(parts + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(parts)]


@dataclass(frozen=True)
class Placement:
    """Which towers each worker runs.

    Args:
        num_towers: logical slices of the global batch, T >= 1.
        num_workers: processes of the job, 1 <= W <= T.

    Raises:
        ConfigError: where T or W is out of range.

    Example:
        >>> Placement(8, 3).towers(0)
        range(0, 3)
        >>> Placement(8, 3).owner(5)
        1
    """

    num_towers: int
    num_workers: int

    def __post_init__(self) -> None:
        if self.num_towers < 1:
            raise ConfigError(f"towers = {self.num_towers}: expected at least 1")
        if not 1 <= self.num_workers <= self.num_towers:
            raise ConfigError(
                f"workers = {self.num_workers}: expected 1 <= workers <= towers = {self.num_towers}; "
                f"start at most {self.num_towers} workers, or ask for more towers"
            )

    def towers(self, worker: int) -> range:
        """Return the contiguous range of towers that `worker` runs."""
        return self.ranges()[worker]

    def ranges(self) -> list[range]:
        """Return every worker's range of towers, in worker order."""
        return even_ranges(self.num_towers, self.num_workers)

    def rows(self, worker: int, num_rows: int) -> dict[int, range]:
        """Return the rows of a batch that each tower of `worker` gets; towers without any are left out.

        >>> Placement(4, 2).rows(1, num_rows=3)
        {2: range(2, 3)}
        """
        ranges = even_ranges(num_rows, self.num_towers)
        return {tower: ranges[tower] for tower in self.towers(worker) if ranges[tower]}

    def owner(self, tower: int) -> int:
        """Return the worker that runs `tower`."""
        assert 0 <= tower < self.num_towers
        return next(worker for worker, towers in enumerate(self.ranges()) if tower in towers)
