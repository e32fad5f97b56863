"""Finds passes that compute with the whole batch instead of their tower's rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from samestep.errors import warn
from samestep.watching.operators.origins import storage_of

__all__ = ["BatchReads"]


class BatchReads:
    """Whether a pass reads tensors of the batch that all towers were cut from, and none of its own rows."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step(())

    def start_step(self, batch: Iterable[Tensor]) -> None:
        """Note the batch of a step."""
        self._of_step = {storage_of(tensor): tensor.size(0) for tensor in batch}
        self.start_pass((), is_known=False)

    def start_pass(self, rows: Iterable[Tensor], *, is_known: bool) -> None:
        """Begin a pass over copies of a tower's rows; `is_known` says whether operators show its reads."""
        sizes = {storage_of(tensor): tensor.size(0) for tensor in rows}
        self._rows = sizes.keys()
        is_part = is_known and not set(sizes.values()) & set(self._of_step.values())
        self._batch = self._of_step.keys() - self._rows if is_part else set()
        self._has_read_batch = False

    def note(self, given: Sequence[Tensor]) -> None:
        """Note the tensors that an operator takes."""
        if not self._batch:
            return
        taken = set(map(storage_of, given))
        self._has_read_batch |= not taken.isdisjoint(self._batch)
        if not taken.isdisjoint(self._rows):  # the pass may use both
            self._batch = set()

    def check(self, who: str) -> None:
        """Warn, once, if the pass's loss was computed from the whole batch alone."""
        if self._has_read_batch and self._batch and not self._has_warned:
            self._has_warned = True
            warn(
                f"{who} has read the whole batch and none of its own rows, so each tower computes what all "
                "of them do together: take the rows from tower.batch"
            )
