"""Finds losses that take a tower's rows for time steps: each is computed from those before it."""

from __future__ import annotations

from torch import Tensor

from samestep.watching.losses.rows import BY_ELEMENT, Rows
from samestep.watching.operators.operator_calls import Call, argument, tensors_in

__all__ = ["RowSteps"]

_RECURRENT = {"_cudnn_rnn", "miopen_rnn", "lstm_mps"}
_RECURRENT_TIME_FIRST = "mkldnn_rnn_layer"  # gets its input transposed already
_ATTENTION = "_scaled_dot_product_"  # begins the names of its kernels

_LINEAR = {*BY_ELEMENT, *(f"{each}_" for each in BY_ELEMENT), "neg", "sum", "mean", "clone", "_to_copy"}
"""Operators by which a program, beside views, adds up what it has computed from each row."""

_JOINING = {"stack", "cat"}  # their results are rows again


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
        # By the tensors' ids: from which rows they were computed, as bits, and of them, those that came
        # together before the last operator that is not linear. They are kept alive, for their ids.
        self._single: dict[int, tuple[int, int, Tensor]] = {}

    def find(self, name: str, call: Call, result: object) -> str:
        """Note an operator that has run; return what goes from row to row in it, if anything does."""
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
        if name in ("unbind", "select"):
            self._note_single(name, call, result)
        is_next = bool(self._single) and name not in _JOINING and self._combines(name, call, result)
        return "a loop" if is_next else ""

    def _note_single(self, name: str, call: Call, result: object) -> None:
        tensor = call.args[0]
        dimension = argument(call.func, "dim", call.args, call.kwargs, 0) % tensor.dim()
        if self._rows.dimension_of(tensor) != dimension or tensor.shape[dimension] != self._rows.num_rows:
            return
        first = call.args[2] % self._rows.num_rows if name == "select" else 0
        for at, each in enumerate(tensors_in((result,)), first):
            self._single[id(each)] = 1 << at, 0, each

    def _combines(self, name: str, call: Call, result: object) -> bool:
        found = [self._single[id(each)] for each in call.given if id(each) in self._single]
        if not found:
            return False
        rows = together = 0
        for of_this, before, _ in found:
            rows |= of_this
            together |= before
        is_linear = name in _LINEAR or call.kind.takes_parts
        if rows & (rows - 1) and not is_linear:
            together = rows
        for each in tensors_in((result,)):
            self._single[id(each)] = rows, together, each
        is_next = any(before and rows & ~before for _, before, _ in found)
        return is_next and any(each.requires_grad for each in call.given)
