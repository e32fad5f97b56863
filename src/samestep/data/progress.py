"""How far a loader is: which batches it has handed out, and which of them steps have used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import warn
from samestep.workers.job import Job

__all__ = ["Progress"]


class Progress:
    """Counts a loader's batches, and warns of a state that leaves out batches no step has used.

    A batch may be skipped on purpose: the loop then takes the next one, or the epoch ends. It is lost if the
    iteration ends with it, as with `zip(loader, range(n))`; if later batches are taken before it is used, as
    by a thread; or if a state is saved before it is used.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._uses_incomplete = False  # whether steps use an epoch's incomplete last batch
        self._has_warned = False
        self.move_to(0)

    @property
    def position(self) -> int:
        """Batches handed out over the whole run."""
        return self._position

    def move_to(self, position: int) -> None:
        """Continue from another position."""
        self._position = position
        self._num_used: int | None = None  # up to the last batch that a step has used since then
        self._num_saved = 0  # the position when a state was last saved
        self._is_ahead = False  # whether later ones had been handed out when it was used
        self._is_left = False  # whether the iteration ended with the last batch that was handed out
        self._has_ended = False  # whether the iteration has

    @contextmanager
    def handing_out(self, *, is_complete: bool = True) -> Iterator[None]:
        """Count a batch, which is handed out in this block; a loop may end with one that is not complete."""
        position = self._position = self._position + 1
        self._is_left = self._has_ended = False
        try:
            yield
        except GeneratorExit:
            self._has_ended = position == self._position
            self._is_left = self._has_ended and (is_complete or self._uses_incomplete)
            raise

    def end_epoch(self) -> None:
        """Note that an epoch has ended; what uses its batches again may be `itertools.cycle`."""
        self._has_ended = True

    def use(self, position: int, *, is_complete: bool = True) -> None:
        """Note that a step has used the batch at a position."""
        num_used = position + 1
        if self._num_used is not None and num_used <= self._num_used and not self._has_ended:
            return  # it is used once more
        self._num_used = num_used
        self._is_ahead = num_used < self._position
        self._uses_incomplete |= not is_complete
        if num_used <= self._num_saved and not self._is_ahead:
            self._warn(
                f"a state was saved at batch {self._num_saved}, before a step had used batch {position}, so "
                "a run that continues from it leaves that batch out: expected a save after the step"
            )

    def check_used(self) -> None:
        """Warn, on worker 0, if a run that continues from here leaves out batches that were not used."""
        if not self._job.is_first:
            return
        first, end = self._num_used, self._position
        self._num_saved = end
        if first is None or first >= end or not (self._is_left or self._is_ahead):
            return
        one, many = f"batch {first} was", f"batches {first} to {end - 1} were"
        what = f"{one} not used by a step, so a run that continues from this state leaves it out"
        if end > first + 1:
            what = f"{many} not used by a step, so a run that continues from this state leaves them out"
        self._warn(
            f"the loader is at batch {end}, but {what}: expected each batch to be used before the next is "
            "taken, as in `for batch in loader`; use zip(range(n), loader), not zip(loader, range(n)); break "
            "after a step, not before it; num_workers, not a thread that reads ahead; and a loop over "
            "epochs, not itertools.cycle (docs/data.md)"
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(text)
