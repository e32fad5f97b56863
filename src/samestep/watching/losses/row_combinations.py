"""Finds losses that combine a tower's rows with each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverload

from samestep.watching.losses.feature_statistics import FeatureStatistics
from samestep.watching.losses.graph import graph_of
from samestep.watching.losses.row_comparisons import Combination, RowComparisons
from samestep.watching.losses.row_functions import RowFunctions
from samestep.watching.losses.row_steps import RowSteps
from samestep.watching.losses.row_sums import RowSum
from samestep.watching.losses.rows import BATCHED, BY_ELEMENT, Rows
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.program.program_line import ProgramLine

__all__ = ["RowCombinations"]

_PRODUCTS = {"mm", "addmm", *BATCHED}
_DISTANCES = {"_cdist_forward", "_euclidean_dist"}
_MOST_ELEMENTS = 2**20


class RowCombinations:
    """The tensors of a pass that combine its rows: by pairs, along a dimension, or one after the other."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._steps, self._functions = rows, RowSteps(rows), RowFunctions()
        self._comparisons, self._statistics = RowComparisons(rows), FeatureStatistics(rows)
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._steps.clear()
        self._functions.clear()
        self._comparisons.clear()
        self._statistics.clear()
        self._found: list[tuple[Tensor, Combination]] = []

    def note(self, call: Call, result: Any, *, takes_rows: bool) -> None:
        """Note an operator that has run; `takes_rows` says whether it took tensors with rows in front."""
        if not self._rows.num_rows or not isinstance(call.func, OpOverload):
            return
        compared = self._comparisons.find(call, result)
        self._statistics.note(call, result, takes_rows=takes_rows)
        first = next(tensors_in((result,)), None)
        if first is None:
            return
        if (root := self._functions.squared(call, result)) is not None:
            self._found = [each for each in self._found if each[0] is not root]
        elif what := self._functions.find(call, result, takes_rows=takes_rows):
            self._note(first, f"{what} over rows", "function")
        elif how := self._steps.find(call, result):
            self._note(first, f"{how} over rows", "time")
        elif compared is not None:
            self._found.append((first, compared))
        elif 1 < first.numel() <= _MOST_ELEMENTS and self._has_pairs(call):
            shape = " x ".join(map(str, first.shape))
            is_time = call.name in BATCHED and len(first) > 1
            self._note(first, f"a tensor of {shape} made", "time" if is_time else "pairs")
            self._comparisons.follow(result, self._found[-1][1])

    def sum_of(self, loss: Any) -> RowSum | None:
        """Return the sum over rows that a loop has added up to this loss; None if it is none."""
        return self._steps.sum_of(loss)

    def in_losses(self, losses: Iterable[Any]) -> Combination | None:
        """Return what losses are made of that combines rows, and forget the pass; None if nothing does."""
        by_node = {held.grad_fn: what for held, what in self._found if held.grad_fn is not None}
        known = [loss for loss in losses if isinstance(loss, Tensor)]
        statistic = next(filter(None, map(self._statistics.in_loss, known)), None)
        self.clear()
        nodes = graph_of(known) if by_node else ()
        return next((by_node[node] for node in nodes if node in by_node), statistic)

    def _note(self, made: Tensor, what: str, how: Literal["pairs", "time", "function"]) -> None:
        self._found.append((made, Combination(f"{what} in {ProgramLine.current()}", how)))

    def _has_pairs(self, call: Call) -> bool:
        name = call.name
        if name not in _PRODUCTS | _DISTANCES | BY_ELEMENT:
            return False
        tensors = list(tensors_in(call.args))[-2:]
        at = [self._rows.dimension_of(each) for each in tensors]
        if len(at) < 2 or None in at or not any(map(self._comparisons.is_of_model, tensors)):
            return False
        left, right = (
            where - each.dim() for where, each in zip(at, tensors, strict=True) if where is not None
        )
        if name in BY_ELEMENT:
            return left != right
        return (left, right) == ((-2, -2) if name in _DISTANCES else (-2, -1))
