"""Finds losses that compare a tower's rows with each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from samestep.watching.losses.graph import graph_of
from samestep.watching.losses.rows import BY_ELEMENT, Rows
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.program.program_line import ProgramLine

__all__ = ["RowPairs"]

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_DISTANCES = {"_cdist_forward", "_euclidean_dist"}
_MOST_ELEMENTS = 2**20


class RowPairs:
    """The tensors of a pass with an element for each pair of its rows, such as a matrix of similarities."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._found: list[tuple[Tensor, str]] = []

    def note(self, call: Call, result: Any) -> None:
        """Note an operator that has run."""
        if not isinstance(result, Tensor) or not 1 < result.numel() <= _MOST_ELEMENTS:
            return
        if isinstance(call.func, OpOverload) and self._has_pairs(call):
            shape = " x ".join(map(str, result.shape))
            self._found.append((result, f"a tensor of {shape} made in {ProgramLine.current()}"))

    def in_loss(self, loss: Any) -> str | None:
        """Return the tensor of pairs that a loss is made of, in words, and forget the pass; None if none."""
        by_node = {held.grad_fn: words for held, words in self._found if held.grad_fn is not None}
        self.clear()
        if not by_node or not isinstance(loss, Tensor):
            return None
        return next((by_node[node] for node in graph_of([loss]) if node in by_node), None)

    def _has_pairs(self, call: Call) -> bool:
        name = call.func.overloadpacket.__name__
        if name not in _PRODUCTS | _DISTANCES | BY_ELEMENT:
            return False
        tensors = list(tensors_in(call.args))[-2:]
        at = [self._rows.dimension_of(each) for each in tensors]
        if len(at) < 2 or None in at or not any(each.requires_grad for each in tensors):
            return False
        left, right = (
            where - each.dim() for where, each in zip(at, tensors, strict=True) if where is not None
        )
        if name in BY_ELEMENT:
            return left != right
        return (left, right) == ((-2, -2) if name in _DISTANCES else (-2, -1))
