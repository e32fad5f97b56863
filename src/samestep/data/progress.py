"""How far a loader is: which batches it has handed out, and which of them steps have used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import warn

__all__ = ["Progress"]


class Progress:
    """Counts a loader's batches, and warns of a state that leaves out batches no step has used.

    A batch may be skipped on purpose: the loop then takes the next one, or the epoch ends. It is lost if the
    iteration ends with it, as with `zip(loader, range(n))`, or if later batches are taken before it is used,
    as by a thread.
    """

    def __init__(self) -> None:
        self.move_to(0)

    @property
    def position(self) -> int:
        """Batches handed out over the whole run."""
        return self._position

    def move_to(self, position: int) -> None:
        """Continue from another position."""
        self._position = position
        self._num_used: int | None = None  # up to the last batch that a step has used since then
        self._is_ahead = False  # whether later ones had been handed out at that time
        self._is_left = False  # whether the iteration ended with the last batch that was handed out

    @contextmanager
    def handing_out(self, *, is_whole: bool = True) -> Iterator[None]:
        """Count a batch, which is handed out in this block; a loop may end with one that is not whole."""
        position = self._position = self._position + 1
        self._is_left = False
        try:
            yield
        except GeneratorExit:
            self._is_left = is_whole and position == self._position
            raise

    def use(self, position: int) -> None:
        """Note that a step has used the batch at a position."""
        self._num_used = position + 1
        self._is_ahead = self._num_used < self._position

    def check_used(self) -> None:
        """Warn if a run that continues from here leaves out batches that were handed out and not used."""
        first, end = self._num_used, self._position
        if first is None or first >= end or not (self._is_left or self._is_ahead):
            return
        one, many = f"batch {first} was", f"batches {first} to {end - 1} were"
        warn(
            f"the loader is at batch {end}, but {one if end == first + 1 else many} not used by a step, so a "
            "run that continues from this state leaves that out: expected each batch to be used before the "
            "next is taken, as in `for batch in loader`; use zip(range(n), loader), not "
            "zip(loader, range(n)); break after a step, not before it; num_workers, not a thread that reads "
            "ahead; and a loop over epochs, not itertools.cycle (docs/data.md)"
        )
