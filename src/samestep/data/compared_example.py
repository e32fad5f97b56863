"""The example of a dataset that all workers compared last, and that a run which continues reads again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samestep.data.order import REPEAT
from samestep.data.readers import COMPARED, Compared, Request
from samestep.errors import warn

__all__ = ["ComparedExample"]


class ComparedExample:
    """Notices that a run continues with other data: keeps an example's number and checksum in the state."""

    def __init__(self) -> None:
        self._last: tuple[int, int, int] | None = None  # epoch, number in a `Request`, checksum
        self._is_due = self._has_read = False

    @property
    def state(self) -> tuple[int, int, int] | None:
        """What a loader's state holds of it; None before the first comparison."""
        return self._last

    def load(self, state: Any) -> None:
        """Restore a state, so that the example is due to be read again, unless this process has read some."""
        self._last = state
        self._is_due = self._last is not None and not self._has_read

    def read(self, read: Callable[[Request, int], Compared], request: Request) -> int:
        """Return a checksum of what a batch's request compares, and keep that of the example."""
        compared, self._has_read = read(request, COMPARED), True
        assert request.compared is not None
        self._last = request.epoch, request.compared, compared.example
        return compared.example ^ compared.collated

    def request(self, position: int) -> Request | None:
        """Return a request, once, to read a loaded state's example before the batch at `position`."""
        is_due, self._is_due = self._is_due, False
        if not is_due or self._last is None or position == 0:
            return None
        epoch, number, _ = self._last
        return Request(epoch, position - 1, {}, number)

    def check(self, compared: Compared) -> None:
        """Warn if the example is another one now."""
        assert self._last is not None
        epoch, number, expected = self._last
        self._has_read = True
        if compared.example != expected:
            warn(
                f"example {number % REPEAT} of the dataset, in epoch {epoch}, is another one "
                "than in the run that is continued: expected the same data in the same order, and the same "
                "versions of libraries and CPU model; ignore this if the program changes the dataset in the "
                "course of a run, or if examples hold paths of another folder"
            )
