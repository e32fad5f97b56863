"""Finds losses that are sums over a tower's rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from samestep.watching.losses.rows import Rows
from samestep.watching.operators.operator_calls import SUM, Call, number_of, reduction_of, tensors_in
from samestep.watching.operators.origins import Kept, is_dense, keep_address, storage_of
from samestep.watching.program.program_line import ProgramLine

__all__ = ["RowSums"]

_KEEPING = {"add", "sub", "rsub", "neg", "add_", "sub_", "neg_", "sum", "stack", "view", "_to_copy", "clone"}
"""Operators whose result is still a sum over rows."""

_SCALING = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
"""Products and quotients: the power of their second argument."""

_ROUNDING = 1e-3
_MOST_ELEMENTS = 4096  # of weights whose sum is taken


class _Sum(NamedTuple):
    """A tensor that was computed from sums over rows, by sums and products."""

    tensor: Tensor  # kept alive, so that no other one gets its id
    line: str  # where the rows were summed
    factor: float  # by which a sum was multiplied


class RowSums:
    """The sums over rows that a pass has computed."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        # By which terms were multiplied, by storage, with what keeps its address from being reused.
        self._factors: dict[int, tuple[float, Kept]] = {}
        self._sums: dict[int, _Sum] = {}

    def note(self, call: Call, result: Any, *, takes_rows: bool) -> None:
        """Note an operator that has run; `takes_rows` says whether it took tensors with rows in front."""
        name = getattr(getattr(call.func, "overloadpacket", None), "__name__", "")
        sums = [self._sums[id(each)] for each in tensors_in(call.args) if id(each) in self._sums]
        if sums:
            self._note_sum(name, call, sums, result)
        elif takes_rows:
            self._note_terms(name, call, result)

    def line_of(self, loss: Any, num_rows: int) -> str | None:
        """Return where a loss was summed over the rows, and forget the pass; None if it was not.

        It is a mean if it was divided by the number of rows or more.
        """
        found = self._sums.get(id(loss))
        self.clear()
        return found.line if found is not None and found.factor * num_rows > 1 + _ROUNDING else None

    def _note_sum(self, name: str, call: Call, sums: list[_Sum], result: Any) -> None:
        if not isinstance(result, Tensor) or result.numel() > len(sums):
            return
        largest = max(sums, key=lambda each: each.factor)
        if name in _SCALING:
            self._sums[id(result)] = largest._replace(
                tensor=result, factor=largest.factor * _factor_in(name, call)
            )
        elif name in _KEEPING:
            self._sums[id(result)] = largest._replace(tensor=result)

    def _note_terms(self, name: str, call: Call, result: Any) -> None:
        if name in _SCALING and self._rows.dimension_of(result) == 0:
            factor = math.prod(map(self._factor_of, call.given)) * _factor_in(name, call)
            self._factors[storage_of(result)] = factor, keep_address(result)
        if name == "sum" or reduction_of(call.func, call.args, call.kwargs) == SUM:
            terms, total = call.args[0], result if isinstance(result, Tensor) else result[0]
            if total.numel() == 1 and terms.requires_grad and self._rows.dimension_of(terms) == 0:
                self._sums[id(total)] = _Sum(total, str(ProgramLine.current()), self._factor_of(terms))

    def _factor_of(self, tensor: Tensor) -> float:
        return self._factors.get(storage_of(tensor), (1.0, None))[0]


def _factor_in(name: str, call: Call) -> float:
    """Return the number by which a product multiplies; 0 if by weights that add up to one, as in a mean."""
    factor = 1.0
    for value, power in zip(call.args[:2], (1, _SCALING[name]), strict=True):
        number = number_of(value)
        if number is not None:
            factor *= number**power
        elif isinstance(value, Tensor) and _is_small(value):
            total = float((value.detach().double() ** power).sum())
            factor *= not math.isclose(abs(total), 1, rel_tol=_ROUNDING)
    return factor


def _is_small(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_complex() and 1 < tensor.numel() <= _MOST_ELEMENTS
