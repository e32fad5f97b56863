"""Finds losses that are not means over a tower's rows, but over its labels, or over what a mask selects."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from samestep.errors import warn
from samestep.watching.graph import graph_of

__all__ = ["Mean", "Means", "PassMeans"]

aten = torch.ops.aten

_MEAN = 1  # torch's number for reduction="mean"
_OF_LABELS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_MEANS = {aten.mean.default, aten.mean.dim}
_DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar}
_TOLERANCE = 1e-3  # programs add 1e-6 or the like to a count, and float32 rounds its reciprocal


class Mean(NamedTuple):
    """A mean that a pass has computed.

    Attributes:
        over: what it is over.
        by: how its divisor was found, for messages.
        divisor: what the sum was divided by.
        length: of the first dimension, if the mean is over all elements of a tensor, or all labels.
    """

    over: Literal["entries", "labels"]
    by: str
    divisor: float
    length: int | None = None

    @property
    def kind(self) -> str:
        """What it is over, in words."""
        return self.over + self.by


class PassMeans:
    """The means that a pass has computed, and which of them its loss is made of."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Mean, Tensor]] = {}  # by the ids of the results, which are kept alive
        self._rows = 0

    def start_pass(self, rows: int) -> None:
        """Forget the previous pass; this one has so many rows."""
        self._found.clear()
        self._rows = rows

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an operator that computes a mean, if a gradient flows through it.

        A quotient of two scalars is a mean if the divisor is a whole number, and so is a product with its
        reciprocal. A mean that is multiplied by its own divisor, or its part of the rows, is a sum again.
        """
        if not isinstance(func, OpOverload):
            return
        value = args[0] if args else None
        if not isinstance(value, Tensor):
            return
        if func in _PRODUCTS:
            mean = self._of_product(value, args[1])
        elif not value.requires_grad:
            return
        elif func in _DIVISIONS:
            mean = self._of_division(value, args[1])
        else:
            mean = _of_reduction(func, value, args, kwargs, result)
        if mean is not None:
            held = result if isinstance(result, Tensor) else result[0]
            self._found.setdefault(id(held), (mean, held))

    def _of_division(self, value: Tensor, divisor: Any) -> Mean | None:
        number = _number(divisor)
        if value.numel() != 1 or number is None:
            return None
        if id(value) in self._found and number < 1:  # as in `(loss * mask).mean() / mask.mean()`
            number *= self._found[id(value)][0].divisor
        return _by_division(number)

    def _of_product(self, value: Tensor, other: Any) -> Mean | None:
        for each, factor in ((value, other), (other, value)):
            number = _number(factor)
            if number is None or not isinstance(each, Tensor) or each.numel() != 1 or not each.requires_grad:
                continue
            if id(each) in self._found:
                mean, _ = self._found[id(each)]
                counts = mean.divisor, mean.length or 0
                factors = *counts, *(count / self._rows for count in counts)
                if any(math.isclose(number, factor, rel_tol=_TOLERANCE) for factor in factors):
                    del self._found[id(each)]
                    return None
            return _by_division(1 / number) if 0 < number < 1 else None
        return None

    def of_loss(self, loss: Any) -> list[Mean]:
        """Return the means that a loss is made of, in order, and forget all.

        Means that are inside of one over the rows are left out: those of each single row, for example.
        """
        by_node = {held.grad_fn: mean for mean, held in self._found.values() if held.grad_fn is not None}
        self._found.clear()
        if not by_node or not isinstance(loss, Tensor):
            return []

        def is_not_over_rows(node: Any) -> bool:
            mean = by_node.get(node)
            return mean is None or self._rows not in (mean.divisor, mean.length)

        used = set(graph_of([loss], is_not_over_rows))
        return [mean for node, mean in by_node.items() if node in used]


def _of_reduction(
    func: OpOverload, values: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Mean | None:
    if func in _MEANS:
        return _of_all(values) if isinstance(result, Tensor) and result.numel() == 1 else None
    at = _reduction_at(func)
    if at is None or (args[at] if at < len(args) else kwargs.get("reduction", _MEAN)) != _MEAN:
        return None
    if func in _OF_LABELS:
        count, (_, labels, weights, *_) = float(result[1]), args
        is_of_all = weights is None and count == labels.numel()
        by = "" if weights is None else ", by their weights"
        return Mean("labels", by, count, values.shape[0] if is_of_all else None)
    return _of_all(values)


def _of_all(values: Tensor) -> Mean:
    return Mean("entries", "", values.numel(), values.shape[0] if values.dim() else None)


@functools.cache
def _reduction_at(func: OpOverload) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("reduction") if "reduction" in names else None


def _number(value: object) -> float | None:
    """Return a positive number, of Python or in a tensor without a gradient; None for anything else."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not (value.requires_grad or value.is_complex())
        value = value.item() if is_number else None
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else None


def _by_division(divisor: float) -> Mean | None:
    """Return the mean of a sum that was divided by a count; None if it is no whole number."""
    count = round(divisor)
    is_count = count > 0 and abs(divisor - count) <= _TOLERANCE
    return Mean("entries", " (a sum divided by their number)", count) if is_count else None


class Means:
    """Compares the means of a worker's passes: they should cover as many entries per row in each tower."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._last: tuple[str, int, Sequence[Mean]] | None = None  # the pass before

    def compare(self, tower: str, rows: int, means: Sequence[Mean]) -> None:
        """Warn, once, if a mean covers another number of entries per row than in the pass before.

        There is no warning for means over as many entries for any number of rows, such as over weights; for
        those over [rows, ...], where each row weighs the same; nor, in towers of one row, for those that are
        not over labels.
        """
        last, self._last = self._last, (tower, rows, means)
        if last is None or self._has_warned:
            return
        before, rows_before, means_before = last
        if [each.kind for each in means] != [each.kind for each in means_before]:
            return
        for old, new in zip(means_before, means, strict=True):
            is_alike = new.divisor == old.divisor or new.divisor * rows_before == old.divisor * rows
            is_over_rows = (old.length, new.length) == (rows_before, rows)
            is_of_one_row = 1 in (rows, rows_before) and new.over != "labels"
            if not (is_alike or is_over_rows or is_of_one_row):
                self._has_warned = True
                _warn(new, [(before, old.divisor), (tower, new.divisor)])
                return


def _warn(mean: Mean, found: Sequence[tuple[str, float]]) -> None:
    numbers = ", ".join(f"{divisor:g} in {tower}" for tower, divisor in found)
    warn(
        f"a loss is a mean over {mean.kind}: {numbers}. Towers are weighted by their rows, so {mean.over} do "
        "not all weigh the same; if they should, pass their sum and their number, or the sum of their "
        "weights: tower.backward_sum(total, count), or return a samestep.LossSum from a Step's loss_fn; for "
        "a loss of pairs of rows, use whole_batch"
    )
