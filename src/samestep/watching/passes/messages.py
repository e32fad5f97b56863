"""Finds calls of `torch.distributed` in a loop over towers."""

from __future__ import annotations

from typing import Any

from samestep.errors import UsageError
from samestep.workers.default_group import num_messages

__all__ = ["Messages"]

_NAMESPACES = ("c10d", "_c10d_functional")


class Messages:
    """Finds the messages and collectives that a program starts between the first and the last tower.

    The default process group counts its own. Those of other groups are seen where passes are followed.
    """

    def __init__(self) -> None:
        self._num_started = 0
        self._called = ""

    def start_step(self) -> None:
        """Begin the loop over towers."""
        self._num_started, self._called = num_messages(), ""

    def note(self, func: Any) -> None:
        """Note an operator that the loop calls."""
        if not self._called and getattr(func, "namespace", "") in _NAMESPACES:
            self._called = f" ({func.overloadpacket.__name__.rstrip('_')})"

    def check(self, who: object, *, counts: bool) -> None:
        """Raise if the loop has called `torch.distributed`.

        Args:
            who: the tower.
            counts: whether to look at the default group's counter: only before samestep starts an exchange.

        Raises:
            UsageError: names the tower.
        """
        if self._called or (counts and num_messages() != self._num_started):
            raise UsageError(
                f"{who}: the loop over towers called torch.distributed{self._called}, but workers run "
                "different numbers of passes, on different rows: use the report, or towers.gather() after "
                "average()"
            )
