"""The operators of a pass, for what they say of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from samestep.watching.losses.loss_forms import LossForm
from samestep.watching.losses.pass_means import PassMeans
from samestep.watching.losses.row_combinations import RowCombinations
from samestep.watching.losses.row_sums import RowSums
from samestep.watching.losses.rows import Rows
from samestep.watching.operators.operator_calls import Call

__all__ = ["LossOperators"]


class LossOperators:
    """Notes a pass's operators, and says what its loss was made of by them.

    Args:
        depends_on_rows: says whether a tensor was computed from the tower's rows or random numbers.
    """

    def __init__(self, depends_on_rows: Callable[[Tensor], bool]) -> None:
        self._means = PassMeans()
        self._rows = Rows()
        self._sums = RowSums(self._rows, self._means, depends_on_rows)
        self._combinations = RowCombinations(self._rows)

    def start_pass(self, num_rows: int, rows: Iterable[Tensor]) -> None:
        """Begin a pass over so many rows, in these tensors."""
        self._means.start_pass(num_rows)
        self._rows.start_pass(num_rows, rows)

    def note(self, call: Call, result: Any) -> None:
        """Note an operator that has run."""
        self._means.note(call.func, call.args, call.kwargs, result)
        takes_rows = self._rows.note(call, result)
        self._sums.note(call, result, takes_rows=takes_rows)
        self._combinations.note(call, result, takes_rows=takes_rows)

    def form_of(self, loss: Any, *, has_own_count: bool) -> LossForm:
        """Return what the loss, or its sums by name, are made of, and forget it. No tensor is kept for it."""
        losses = loss if isinstance(loss, Mapping) else {"loss": loss}
        sums = self._sums.of_losses(losses)
        for name, each in losses.items():
            by_loop = self._combinations.sum_of(each)
            if by_loop is not None and (name not in sums or (sums[name].is_mean and not by_loop.is_mean)):
                sums[name] = by_loop
        return LossForm(
            self._means.scaling_of(loss),
            self._means.of_loss(loss),
            sums,
            self._rows.most_elements,
            has_own_count,
            self._combinations.in_losses(losses.values()),
        )

    def clear(self) -> None:
        """Forget the pass."""
        for each in (self._means, self._rows, self._sums, self._combinations):
            each.clear()
