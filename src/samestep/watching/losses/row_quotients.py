"""Finds quotients by sums over a tower's rows, such as a Dice loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samestep.watching.losses.rows import is_over_rows
from samestep.watching.operators.operator_calls import Call, tensors_in

__all__ = ["RowQuotients"]

_DIVISIONS = {"div", "div_"}
_ADDING = {"add", "add_", "sub", "sub_", "rsub", "neg", "sum"}
_KEEPING = {*_ADDING, *_DIVISIONS, "mul", "mul_", "clamp", "clamp_min", "clone", "view"}
"""Operators of sums over rows whose result is computed from sums alone."""


class RowQuotients:
    """The sums over rows that a pass has computed, also of each class, and their quotients."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        # By the tensors' ids; they are kept alive, so that no other one gets their id.
        self._sums: dict[int, Tensor] = {}

    def is_one(self, name: str, call: Call, result: Any, *, takes_rows: bool) -> bool:
        """Note an operator that has run; return whether it divides by a sum over rows with a gradient.

        `takes_rows` says whether it took tensors with rows in front.
        """
        if takes_rows:
            is_sum = name == "sum" and (len(call.args) == 1 or is_over_rows(call))
        else:
            given = [each for each in tensors_in(call.args) if id(each) in self._sums]
            if name in _DIVISIONS and any(each is call.args[1] and each.requires_grad for each in given):
                return True
            is_sum = bool(given) and name in _KEEPING
        if is_sum:
            self._sums.update((id(each), each) for each in tensors_in((result,)))
        return False
