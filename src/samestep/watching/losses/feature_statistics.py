"""Finds losses of statistics of features over rows: a variance, a correlation, the load of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samestep.watching.losses.row_comparisons import Combination
from samestep.watching.losses.row_functions import FUNCTIONS, KEEPING
from samestep.watching.losses.rows import COUNTING, Rows, dimensions_of
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.operators.tensor_set import TensorSet
from samestep.watching.program.program_line import ProgramLine

__all__ = ["FeatureStatistics"]

_VIEWS = "_unsafe_view t transpose permute unsqueeze squeeze expand select slice diagonal alias"
_PRODUCTS = {"mul", "mm", "bmm", "mv", "dot"}
_KEEPING = {*KEEPING, *_VIEWS.split(), *_PRODUCTS, "mean", "cat", "_to_copy", "detach"}
"""Operators that leave a mean over rows one: the mean of towers' values is the value of all rows.

A clamp only keeps from dividing by zero, as a rule.
"""

_LOSSES = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
_EXTREMES = "max amax min amin logsumexp _softmax _log_softmax linalg_vector_norm"
_NONLINEAR = {*FUNCTIONS, "tanh", "xlogy", *_EXTREMES.split(), *_LOSSES.split()}
_SPREADS = {"std", "var", "var_mean"}


class FeatureStatistics:
    """The means of features over a tower's rows, and nonlinear functions of these.

    What rows are combined with again, as where a layer normalises them, is followed no further.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._means = TensorSet()
        self._made: dict[int, tuple[Combination, Tensor]] = {}  # by ids of tensors, which are kept alive

    def note(self, call: Call, result: Any, *, takes_rows: bool) -> None:
        """Note an operator that has run; `takes_rows` says whether it took tensors with rows in front."""
        if self._is_mean(call):
            self._means.add(result)
        elif found := self._made_by(call, takes_rows=takes_rows):
            self._made.update((id(each), (found, each)) for each in tensors_in((result,)))
        elif self._means and not takes_rows and call.name in _KEEPING and self._of_means(call):
            self._means.add(result)

    def in_loss(self, loss: Tensor) -> Combination | None:
        """Return which statistic a loss was computed from, and where; None if from none."""
        return self._made[id(loss)][0] if id(loss) in self._made else None

    def _of_means(self, call: Call) -> list[Tensor]:
        return [each for each in call.given if each in self._means]

    def _is_mean(self, call: Call) -> bool:
        """Say whether an operator adds up features over rows, with a gradient or without."""
        if call.name in {"mean", "sum"}:
            return self._is_over_rows(call)
        if call.name in COUNTING:
            return self._at(call.args[0]) == 0
        if call.name not in {"mm", "bmm"}:
            return False
        at = [each.dim() - (self._at(each) or 0) for each in call.args[:2]]
        return at == [1, 2] and self._at(call.args[1]) is not None

    def _made_by(self, call: Call, *, takes_rows: bool) -> Combination | None:
        """Return which nonlinear function of means an operator has computed, or has taken one from."""
        if call.name in _SPREADS and self._is_over_rows(call) and call.args[0].requires_grad:
            return _combination(call.name.partition("_")[0])
        if takes_rows or call.kind.takes_shapes_only:
            return None
        taken = next((self._made[id(each)][0] for each in call.given if id(each) in self._made), None)
        if taken is not None or not self._means or not self._is_nonlinear(call):
            return taken
        what = call.name.strip("_")
        return _combination(f"{'a product' if what in _PRODUCTS else what} of means")

    def _is_nonlinear(self, call: Call) -> bool:
        name, means = call.name.rstrip("_"), self._of_means(call)
        if not any(each.requires_grad for each in means):
            return False
        if name == "div":
            return any(each is call.args[1] and each.requires_grad for each in means)
        return name in _NONLINEAR or (name in _PRODUCTS and len(means) > 1)

    def _is_over_rows(self, call: Call) -> bool:
        """Say whether an operator works along rows, and leaves features."""
        at = self._at(call.args[0])
        return at in dimensions_of(call) and call.args[0].shape[at] < call.args[0].numel()

    def _at(self, tensor: Tensor) -> int | None:
        return self._rows.dimension_of(tensor)


def _combination(what: str) -> Combination:
    return Combination(f"{what} of features over rows in {ProgramLine.current()}", "function")
