"""Finds nonlinear functions of sums and means over a tower's rows: a Dice loss, the root of a mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samestep.watching.losses.rows import is_over_all, is_over_rows, norm_order
from samestep.watching.operators.operator_calls import (
    MEAN,
    SUM,
    Call,
    reduction_of,
    square_of,
    tensors_in,
)
from samestep.watching.operators.tensor_set import TensorSet

__all__ = ["FUNCTIONS", "KEEPING", "RowFunctions"]

_DIVISIONS = {"div", "div_"}
_ADDING = {"add", "add_", "sub", "sub_", "rsub", "neg", "sum", "stack"}
KEEPING = {*_ADDING, *_DIVISIONS, "mul", "mul_", "clamp", "clamp_min", "clone", "view"}
"""Operators of sums over rows whose result is computed from sums alone."""

_POWERS = {"pow", "reciprocal", "rsqrt", "sqrt"}
FUNCTIONS = {*_POWERS, "abs", "exp", "log", "log1p", "relu", "sigmoid", "softplus"}


class RowFunctions:
    """The sums over rows that a pass has computed, also those of each class; and means and norms of all."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._sums, self._means, self._norms = TensorSet(), TensorSet(), TensorSet()

    def squared(self, call: Call, result: Any) -> Tensor | None:
        """Return the norm whose square an operator has computed, which is a sum over rows; None if none."""
        if (of := square_of(call)) is None or of not in self._norms:
            return None
        self._sums.add(result)
        return of

    def find(self, call: Call, result: Any, *, takes_rows: bool) -> str:
        """Note an operator that has run; return which function of sums or means over rows it is, if any.

        `takes_rows` says whether it took tensors with rows in front.
        """
        if takes_rows:
            return self._note_terms(call, result)
        name = call.name
        sums, means = (
            [each for each in tensors_in(call.args) if each in held and each.requires_grad]
            for held in (self._sums, self._means)
        )
        if name in _DIVISIONS and any(each is call.args[1] for each in sums):
            return "a quotient of sums"
        one = next((each for each in (*sums, *means) if each.numel() == 1), None)
        if one is not None and name.rstrip("_") in FUNCTIONS:
            return f"{name.rstrip('_')} of a {'sum' if one in self._sums else 'mean'}"
        for found, held in ((sums, self._sums), (means, self._means)):
            if found and name in KEEPING:
                held.add(result)
        return ""

    def _note_terms(self, call: Call, result: Any) -> str:
        name, of_all, order = call.name, is_over_all(call), norm_order(call)
        if order is not None and order != 1 and call.args[0].requires_grad:
            self._norms.add(result if order == 2 else ())
            return "a norm"
        reduction = reduction_of(call.func, call.args, call.kwargs)
        if reduction == SUM or order == 1 or (name == "sum" and (of_all or is_over_rows(call))):
            self._sums.add(result)
        elif reduction == MEAN or (name == "mean" and of_all):
            self._means.add(result)
        return ""
