"""How far a loader is: which batches it has handed out, and which of them are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from samestep.errors import UsageError, warn
from samestep.workers.job import Job

__all__ = ["Progress"]

_MANY = 100


class Progress:
    """Counts a loader's batches.

    As long as no step has used a batch of the loader, all that are handed out count. Later, a batch counts
    once a step has used it, or once the loop takes the next one or comes to the epoch's end. So a batch that
    is left by `break`, by an exception or by `zip(loader, range(n))` comes again: the next iteration begins
    with it, and so does a run that continues from a state. If batches are taken ahead, as by a thread, only
    steps count.

    Args:
        towers: the `Towers` that take the steps, or a stand-in that takes none.
        job: this process's view of the job.
    """

    def __init__(self, towers: object, job: Job) -> None:
        self._towers = towers
        self._job = job
        self._is_trained_on = False
        self._uses_incomplete = False  # whether steps use an epoch's incomplete last batch
        self._has_warned = False
        self.num_begun = 0  # iterations
        self.move_to(0)

    @property
    def num_taken(self) -> int:
        """Batches handed out over the whole run."""
        return self._num_taken

    @property
    def position(self) -> int:
        """Batches over the whole run that count."""
        if self._is_ahead:
            return self._num_used
        is_left = self._is_trained_on and self._is_open and self._num_own_batches == self._num_own_before
        return self._num_taken - is_left

    @property
    def _num_own_batches(self) -> int:
        """Steps with batches that no loader knows; they may be this loader's in another form."""
        return getattr(self._towers, "_num_own_batches", 0)

    @property
    def state(self) -> dict[str, Any]:
        """What a loader's state holds beside the position."""
        return {"is_trained_on": True} if self._is_trained_on else {}

    def load(self, position: int, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._is_trained_on = bool(state.get("is_trained_on", self._is_trained_on))
        self.move_to(position)

    def expect_steps(self) -> None:
        """Note that steps use the loader's batches, or are going to."""
        self._is_trained_on = True

    def move_to(self, position: int) -> None:
        """Continue from another position."""
        self._num_taken = self._start = position
        self._num_used = 0  # up to the last batch that a step has used since then; 0 if none has
        self._is_open = False  # whether neither a step nor a request has followed the last batch
        self._is_ahead = False  # whether later ones had been handed out when a step used its batch
        self._has_ended = self._has_run_out = False  # whether the iteration has, and with its epoch
        self._num_again = 0  # batches of an ended iteration that steps have used again, in order
        self._is_list = False  # whether steps used them only after it had ended
        self._left: int | None = None  # an incomplete batch that was not used
        self._saved: tuple[int, bool] | None = None  # position, and whether batches were taken ahead
        self._times_begun = 0  # iterations in a row that have begun at the same position

    def begin(self) -> int:
        """Begin an iteration, and return the position of its first batch.

        Raises:
            UsageError: many iterations in a row have begun here.
        """
        start = self._num_taken if self._has_run_out else self.position
        if self._is_trained_on:
            self._check_goes_on(start)
        self._num_taken = self._start = start
        self._is_open = self._has_run_out = False
        self._is_ahead &= self._num_used < start
        self.num_begun += 1
        return start

    def _check_goes_on(self, start: int) -> None:
        self._times_begun = self._times_begun + 1 if start == self._start else 1
        if self._times_begun > _MANY:
            raise UsageError(
                f"{_MANY} iterations in a row have begun with batch {start}, as no step has used it, and no "
                "loop has taken the next one: expected one iterator, it = iter(loader), to take batches from"
            )

    def is_at(self, position: int, num_begun: int) -> bool:
        """Whether an iteration is still the newest one, and no other position was set."""
        return (position, num_begun) == (self._num_taken, self.num_begun)

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Count a batch, which is handed out in this block."""
        self._num_taken += 1
        here = self._num_taken, self.num_begun
        self._is_open, self._has_ended, self._left = True, False, None
        self._is_looked_at = False
        self._num_own_before = self._num_own_batches
        try:
            yield
        except GeneratorExit:
            if self.is_at(*here):
                self._has_ended = True
                if self._is_open and self._is_looked_at:
                    self._left = self._num_taken - 1 if self._uses_incomplete else None
                    self._is_open = False
            raise
        if self.is_at(*here):
            self._is_open = False
            self._is_trained_on |= self._num_own_batches > self._num_own_before

    def look(self) -> None:
        """Note that a program looks at the size of an incomplete batch; its loop may end with it for that."""
        self._is_looked_at = True

    def end_epoch(self) -> None:
        """Note that an epoch has ended."""
        self._has_ended = self._has_run_out = True

    def use(self, position: int, *, is_complete: bool = True) -> None:
        """Note that a step has used the batch at a position."""
        num_used = position + 1
        if num_used > self._num_taken:
            return  # a batch from before another position was set
        self._is_trained_on = True
        self._uses_incomplete |= not is_complete
        self._is_open &= num_used < self._num_taken
        if num_used <= self._num_used:
            self._use_again(position)
            return
        self._compare_with_saved(position)
        self._num_used = num_used
        self._is_ahead = num_used < self._num_taken
        self._num_again, self._is_list = 0, self._has_ended

    def _use_again(self, position: int) -> None:
        num_batches = self._num_taken - self._start
        if self._has_ended and num_batches:
            is_next = position == self._start + self._num_again % num_batches
            self._num_again = self._num_again + 1 if is_next else 0

    def check_used(self) -> None:
        """Warn, on worker 0, if a run that continues from here would use other batches than this one."""
        position, num_again = self.position, self._num_again
        self._saved = position, self._is_ahead
        if self._left is not None:
            self._warn(
                f"batch {self._left} was not used by a step, and a run that continues from this state leaves "
                "it out, as incomplete batches with which a loop ends are left out on purpose: expected "
                "drop_last=True, or zip(range(n), loader), not zip(loader, range(n)), or a break after the "
                "step (docs/data.md)"
            )
        if num_again > 1 and not (self._is_list and num_again % (self._num_taken - self._start) == 0):
            self._warn(
                f"batches from {self._start} on were used again after their iteration had ended, and a run "
                f"that continues from this state goes on at batch {position}: expected a loop over epochs, "
                "not itertools.cycle, and a save after the last use of a list of batches (docs/data.md)"
            )

    def _compare_with_saved(self, position: int) -> None:
        saved, was_ahead = self._saved or (0, False)
        if position < saved:
            self._warn(
                f"a state was saved at batch {saved}, before a step had used batch {position}, so a run that "
                "continues from it leaves that batch out: expected a save after the step"
            )
        elif was_ahead and position > saved:
            self._warn(
                f"a state was saved at batch {saved}, which had been taken, but has not been used, so a run "
                "that continues from it uses other batches: expected each batch to be used, or to be left "
                "out, before the next is taken"
            )
        self._saved = None if position >= saved else self._saved

    def _warn(self, text: str) -> None:
        if self._job.is_first and not self._has_warned:
            self._has_warned = True
            warn(text)
