"""The means that a tower's pass computes, and which of them its loss is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from samestep.watching.losses.graph import graph_of
from samestep.watching.losses.means import Mean
from samestep.watching.losses.scaled_losses import Scaling
from samestep.watching.operators.operator_calls import MEAN, OF_LABELS, number_of, reduction_of
from samestep.watching.operators.tensor_set import TensorSet

__all__ = ["PassMeans"]

aten = torch.ops.aten

_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_ADJUSTING = {aten.add.Tensor, aten.clamp.default, aten.clamp_min.default, aten.maximum.default}
_DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar}
_TOLERANCE = 1e-3  # programs add 1e-6 or the like to a count, and float32 rounds its reciprocal
_MOST_ELEMENTS = 64


class PassMeans:
    """The means that a pass has computed, and how they were scaled.

    Tensors are known by their ids, and kept alive until `clear`.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Mean, Tensor]] = {}
        self._made_of = TensorSet()  # small tensors that were computed from these means
        self._multiples = TensorSet()  # of means
        self._totals: dict[int, tuple[Tensor, Tensor]] = {}  # sums and means of weights, and the weights
        self._normalized: dict[int, tuple[float, Tensor]] = {}  # weights, and by what they were divided
        self._scaled: dict[int, tuple[Scaling, Tensor]] = {}
        self._rows = 0

    def clear(self) -> None:
        """Forget the pass."""
        for held in (
            self._found,
            self._made_of,
            self._multiples,
            self._totals,
            self._normalized,
            self._scaled,
        ):
            held.clear()

    def start_pass(self, rows: int) -> None:
        """Note the means of a pass over so many rows."""
        self.clear()
        self._rows = rows

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an operator that computes a mean, if a gradient flows through it.

        A quotient of two scalars is a mean if the divisor is a whole number or a sum of weights, and so is a
        product with the reciprocal of a whole number. A mean that is multiplied by its own divisor, or its
        part of the rows, is a sum again. Other multiples of means are none: the part of a mixed label, say.
        """
        value = args[0] if args else None
        if isinstance(func, OpOverload) and isinstance(value, Tensor):
            if func in _DIVISIONS | _PRODUCTS and any(map(self._is_multiple, args[:2])):
                self._multiples.add(result)
            self._note_scaled(func, value, args, result)
            mean = self._mean(func, value, args, kwargs, result)
            if mean is not None:
                held = result if isinstance(result, Tensor) else result[0]
                self._found.setdefault(id(held), (mean, held))
                self._made_of.add(held)
        is_small = isinstance(result, Tensor) and result.numel() <= _MOST_ELEMENTS
        if self._made_of and is_small and any(each in self._made_of for each in _flat(args)):
            self._made_of.add(result)

    def _mean(
        self, func: OpOverload, value: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Mean | None:
        if func in _PRODUCTS:
            self._note_weighted(value, args[1], result)
            return self._of_product(value, args[1])
        if not value.requires_grad:
            self._note_total(func, value, args, result)
            return None
        if func in _DIVISIONS:
            return self._of_division(value, args[1])
        if id(value) in self._normalized and func in _SUMS | _MEANS and result.numel() == 1:
            divisor = self._normalized[id(value)][0]
            return _by_weights(divisor if func in _SUMS else divisor * value.numel())
        return _of_reduction(func, value, args, kwargs, result)

    def _note_total(self, func: OpOverload, value: Tensor, args: Sequence[Any], result: Any) -> None:
        """Note sums and means of weights, and weights that are divided by their own."""
        if func in _SUMS | _MEANS and result.numel() == 1:
            self._totals[id(result)] = result, value
        elif func in _ADJUSTING and id(value) in self._totals:
            self._totals[id(result)] = result, self._totals[id(value)][1]
        elif func in _DIVISIONS and id(args[1]) in self._totals and self._totals[id(args[1])][1] is value:
            self._normalized[id(result)] = float(args[1]), result

    def _note_weighted(self, value: Tensor, other: Any, result: Tensor) -> None:
        for each, factor in ((value, other), (other, value)):
            if id(each) in self._normalized:
                divisor = self._normalized[id(each)][0]
                self._normalized[id(result)] = divisor / (number_of(factor) or 1), result

    def _note_scaled(self, func: OpOverload, value: Tensor, args: Sequence[Any], result: Any) -> None:
        """Note a number that was computed from means, and is scaled by a whole number of an integer type."""
        if func in _DIVISIONS | _PRODUCTS and value in self._made_of and result.numel() == 1:
            other, how = args[1], "divided" if func in _DIVISIONS else "multiplied"
            is_float = other.is_floating_point() if isinstance(other, Tensor) else isinstance(other, float)
            number = None if is_float else number_of(other)
            scaling = None if number is None else Scaling.of(how, value, int(number))
            if scaling is not None:
                self._scaled[id(result)] = scaling, result

    def _of_division(self, value: Tensor, divisor: Any) -> Mean | None:
        number = number_of(divisor)
        if value.numel() != 1 or number is None:
            return None
        if id(value) in self._found and number < 1:  # as in `(loss * mask).mean() / mask.mean()`
            return _by_count(number * self._found[id(value)][0].divisor)
        if id(divisor) in self._totals and value not in self._made_of:
            return _by_weights(number)
        return self._of_quotient(value, number)

    def _of_quotient(self, value: Tensor, number: float) -> Mean | None:
        """Return the mean of a sum that was divided by a count; of a sum of means only if by the rows."""
        mean = _by_count(number)
        if mean is None or self._is_multiple(value):
            return None
        return mean if mean.divisor == self._rows or value not in self._made_of else None

    def _is_multiple(self, value: object) -> bool:
        """Say whether a tensor is a mean, or one that was multiplied by a weight."""
        return id(value) in self._found or value in self._multiples

    def _of_product(self, value: Tensor, other: Any) -> Mean | None:
        for each, factor in ((value, other), (other, value)):
            number = number_of(factor)
            if number is None or not isinstance(each, Tensor) or each.numel() != 1 or not each.requires_grad:
                continue
            if id(each) in self._found and number != 1:
                mean, _ = self._found[id(each)]
                counts = mean.divisor, mean.length or 0
                factors = *counts, *(count / self._rows for count in counts)
                if any(math.isclose(number, factor, rel_tol=_TOLERANCE) for factor in factors):
                    del self._found[id(each)]
                    self._made_of.discard(each)
                    return None
            return self._of_quotient(each, 1 / number) if number < 1 else None
        return None

    def has(self, tensor: Tensor) -> bool:
        """Say whether a tensor is a mean, of whatever."""
        return id(tensor) in self._found

    def scaling_of(self, loss: Any) -> Scaling | None:
        """Return how means were scaled to give the loss, if they were; before `of_loss`, which forgets it."""
        return self._scaled[id(loss)][0] if id(loss) in self._scaled else None

    def of_loss(self, loss: Any) -> list[Mean]:
        """Return the means that a loss is made of, in order, and forget all.

        Means that are inside of one over the rows are left out: those of each single row, for example.
        """
        by_node = {held.grad_fn: mean for mean, held in self._found.values() if held.grad_fn is not None}
        self.clear()
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
    if reduction_of(func, args, kwargs) != MEAN:
        return None
    if func in OF_LABELS:
        count, (_, labels, weights, *_) = float(result[1]), args
        is_of_all = weights is None and count == labels.numel()
        by = "" if weights is None else ", by their weights"
        return Mean("labels", by, count, values.shape[0] if is_of_all else None)
    return _of_all(values)


def _of_all(values: Tensor) -> Mean:
    return Mean("entries", "", values.numel(), values.shape[0] if values.dim() else None)


def _by_count(divisor: float) -> Mean | None:
    """Return the mean of a sum that was divided by a count; None if it is no whole number."""
    count = round(divisor)
    is_count = count > 0 and abs(divisor - count) <= _TOLERANCE
    return _by_sum(count) if is_count else None


def _by_weights(divisor: float) -> Mean:
    return _by_sum(divisor)._replace(is_weighted=True)


def _by_sum(divisor: float) -> Mean:
    return Mean("entries", " (a sum divided by their number or weights)", divisor)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
