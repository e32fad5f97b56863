"""Finds losses that take a tower's rows for time steps: each is computed from those before it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from samestep.watching.losses.row_sums import SCALING, RowSum, factor_in
from samestep.watching.losses.rows import BY_ELEMENT, Rows
from samestep.watching.operators.operator_calls import Call, argument, tensors_in
from samestep.watching.program.program_line import ProgramLine
from samestep.watching.program.running_factors import divides_by_variable

__all__ = ["RowSteps"]

_ROUNDING = 1e-3

_RECURRENT = {"_cudnn_rnn", "miopen_rnn", "lstm_mps"}
_RECURRENT_TIME_FIRST = "mkldnn_rnn_layer"  # gets its input transposed already
_ATTENTION = "_scaled_dot_product_"  # begins the names of its kernels

_LINEAR = {*BY_ELEMENT, *(f"{each}_" for each in BY_ELEMENT), "neg", "sum", "mean", "clone", "_to_copy"}
"""Operators by which a program, beside views, adds up what it has computed from each row."""

_JOINING = {"stack", "cat"}  # of single rows, their results are rows again


class RowSteps:
    """Follows the tensors of a pass that were computed from single rows.

    Args:
        rows: the tensors that have all rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._single: dict[int, _Computed] = {}  # by the tensors' ids

    def find(self, call: Call, result: object) -> str:
        """Note an operator that has run; return what goes from row to row in it, if anything does."""
        name = call.name
        if name in _RECURRENT or name == _RECURRENT_TIME_FIRST:
            has_rows_first = argument(call.func, "batch_first", call.args, call.kwargs)
            time = 1 if has_rows_first and name in _RECURRENT else 0
            return "a recurrent layer" if self._rows.dimension_of(call.args[0]) == time else ""
        if name.startswith(_ATTENTION):
            queries, keys = call.args[:2]
            is_over_rows = (
                self._rows.dimension_of(queries) == queries.dim() - 2 == self._rows.dimension_of(keys)
            )
            return "attention" if is_over_rows else ""
        if name in ("unbind", "select", "slice"):
            self._note_single(call, result)
        if not self._single or (name in _JOINING and not self._has_sum(call)):
            return ""
        return "a loop" if self._combines(call, result) else ""

    def sum_of(self, loss: Any) -> RowSum | None:
        """Return the sum over rows that a loop has added up to this loss; None if it is none."""
        found = self._single.get(id(loss))
        if found is None or found.rows != self._all_rows or found.together:
            return None
        return RowSum(found.line, found.factor, found.factor, 0.0, 1.0, self._rows.num_rows, is_by_loop=True)

    def _note_single(self, call: Call, result: object) -> None:
        tensor = call.args[0]
        dimension = argument(call.func, "dim", call.args, call.kwargs) % tensor.dim()
        if self._rows.dimension_of(tensor) != dimension or tensor.shape[dimension] != self._rows.num_rows:
            return
        name = "index" if call.name == "select" else "start"  # `unbind` has neither
        first = (argument(call.func, name, call.args, call.kwargs) or 0) % self._rows.num_rows
        for at, each in enumerate(tensors_in((result,)), first):
            if call.name == "slice" and each.shape[dimension] != 1:
                return
            self._single[id(each)] = _Computed(each, 1 << at, 0, 1.0, "")

    def _combines(self, call: Call, result: object) -> bool:
        found = [self._single[id(each)] for each in call.given if id(each) in self._single]
        if not found:
            return False
        rows = together = 0
        for part in found:
            rows |= part.rows
            together |= part.together
        factor = max(part.factor for part in found)
        if call.name in _LINEAR | _JOINING or call.kind.takes_parts:
            scale = factor_in(call) if call.name in SCALING else 1.0
            factor = 0.0 if self._makes_mean(call, scale) else factor * max(1.0, scale)
        else:
            together, factor = rows if rows & (rows - 1) else together, 1.0
        line = str(ProgramLine.current()) if rows == self._all_rows else ""
        for each in tensors_in((result,)):
            self._single[id(each)] = _Computed(each, rows, together, factor, line)
        is_next = any(part.together and rows & ~part.together for part in found)
        return is_next and any(each.requires_grad for each in call.given)

    def _has_sum(self, call: Call) -> bool:
        """Say whether one of the tensors was computed from all rows."""
        found = (self._single.get(id(each)) for each in call.given)
        return any(each is not None and each.rows == self._all_rows for each in found)

    def _makes_mean(self, call: Call, scale: float) -> bool:
        """Say whether a product or quotient divides by the number of rows, or by another count."""
        power, of_one = SCALING.get(call.name), scale * self._rows.num_rows
        is_share = power == 1 and scale < 1 and divides_by_variable()  # as in `1 / count * total`
        return math.isclose(of_one, 1, rel_tol=_ROUNDING) or is_share or (power == -1 and of_one < 1)

    @property
    def _all_rows(self) -> int:
        return (1 << self._rows.num_rows) - 1


class _Computed(NamedTuple):
    """A tensor that was computed from single rows. It is kept alive, so that no other one gets its id.

    Attributes:
        tensor: itself.
        rows: from which, as bits.
        together: those of them that came together before the last operator that is not linear.
        factor: by what it was multiplied since, without weights below one; 0 if it was divided by a count.
        line: where it was computed, if from all rows.
    """

    tensor: Tensor
    rows: int
    together: int
    factor: float
    line: str
