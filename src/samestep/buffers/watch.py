"""Finds buffers that a pass changed although nobody said what should become of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.buffers.policies import Rule
from samestep.buffers.slots import Slot
from samestep.buffers.statistics import is_statistic
from samestep.errors import BufferError

__all__ = ["BufferWatch"]

_MOST_NAMES = 4


class BufferWatch:
    """Remembers which tensors are in the slots, and how often each had been written to.

    `F.batch_norm` writes to running statistics without counting it. So the first step compares the values of
    the buffers that could be such, too: those with one dimension.

    Args:
        slots: those whose buffers may not change.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._seen: list[tuple[Tensor | None, int]] = []
        self._values: list[tuple[Slot, Tensor]] = []
        self._is_first_step = True

    def start_step(self) -> None:
        """Note the buffers and their versions."""
        self._seen = [(buffer, _version(buffer)) for buffer in (slot.get() for slot in self._slots)]
        self._values = []
        if self._is_first_step:
            self._values = [
                (slot, buffer.detach().clone())
                for slot, (buffer, _) in zip(self._slots, self._seen, strict=True)
                if buffer is not None and buffer.is_floating_point() and buffer.dim() == 1
            ]

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a buffer or replaced it since `start_step`.

        Raises:
            BufferError: names the buffers, and says what to do.
        """
        changed = [
            (slot, before)
            for slot, (before, version) in zip(self._slots, self._seen, strict=True)
            if (now := slot.get()) is not before or _version(now) != version
        ]
        if changed:
            raise BufferError(f"{who} {_explain(changed)}")

    def end_step(self) -> None:
        """Check once more, for what a backward changed, and by value in the first step.

        Raises:
            BufferError: names the buffers, and says what to do.
        """
        self.check("a pass")
        values, self._values, self._is_first_step = self._values, [], False
        changed: list[tuple[Slot, Tensor | None]] = [
            (slot, before)
            for slot, before in values
            if (now := slot.get()) is not None and not torch.allclose(now, before, 0, 0, equal_nan=True)
        ]
        if changed:
            raise BufferError(f"a pass {_explain(changed)}")


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _explain(changed: Sequence[tuple[Slot, Tensor | None]]) -> str:
    frozen = [slot for slot, _ in changed if is_statistic(slot)]
    if frozen:
        return f"changed {_names(frozen)}, of layers in eval mode: change modes between steps, not in one"
    empty = [slot for slot, before in changed if before is None]
    if empty:
        return (
            f"filled {_names(empty)}: run the model once before making Towers, or, if no weight depends on "
            f"it, say Towers(..., buffers={_rules(empty, 'ignore')})"
        )
    slots = [slot for slot, _ in changed]
    return (
        f"changed {_names(slots)}: say what becomes of it, as in Towers(..., "
        f"buffers={_rules(slots, 'first')}); 'first' keeps what tower 0 ends with, 'mean' averages over "
        "rows, 'ignore' is for what no weight depends on"
    )


def _names(slots: Sequence[Slot]) -> str:
    return ", ".join(slot.name for slot in slots)


def _rules(slots: Sequence[Slot], rule: Rule) -> dict[str, Rule]:
    """Return the argument that gives the buffers this rule: by their names, many by the ends of them."""
    if len(slots) <= _MOST_NAMES:
        return {slot.name: rule for slot in slots}
    return {f"*{slot.attribute}": rule for slot in slots}
