"""Finds losses that are not means over a tower's rows, but over its labels, or over what a mask selects."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from samestep.errors import warn

__all__ = ["Mean", "Means", "mean_of"]

aten = torch.ops.aten

_MEAN = 1  # torch's number for reduction="mean"
_OF_LABELS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_MEANS = {aten.mean.default, aten.mean.dim}
_DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}


class Mean(NamedTuple):
    """A mean that a pass has computed.

    Attributes:
        over: what it is over, for messages.
        divisor: what the sum was divided by.
        length: of the first dimension, if the mean is over all elements of a tensor.
    """

    over: str
    divisor: float
    length: int | None = None


def mean_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Mean | None:
    """Return the mean that an operator computes, if a gradient flows through it.

    A quotient of two scalars counts as a mean if the divisor is a positive whole number, not another loss.
    """
    values = args[0] if args else None
    if not isinstance(values, Tensor) or not values.requires_grad or not isinstance(func, OpOverload):
        return None
    if func in _DIVISIONS:
        divisor = _whole(args[1]) if values.numel() == 1 else None
        return None if divisor is None else Mean("entries, by division", divisor)
    if func in _MEANS:
        is_full = isinstance(result, Tensor) and result.numel() == 1
        return _of_all(values) if is_full else None
    at = _reduction_at(func)
    if at is None or (args[at] if at < len(args) else kwargs.get("reduction", _MEAN)) != _MEAN:
        return None
    if func in _OF_LABELS:
        return Mean("labels" if args[2] is None else "labels, by their weights", float(result[1]))
    return _of_all(values)


def _of_all(values: Tensor) -> Mean:
    return Mean("entries", values.numel(), values.shape[0] if values.dim() else None)


def _whole(divisor: object) -> float | None:
    if isinstance(divisor, Tensor):
        is_count = divisor.numel() == 1 and not (divisor.requires_grad or divisor.is_complex())
        divisor = divisor.item() if is_count else None
    if isinstance(divisor, (int, float)) and divisor >= 1 and divisor % 1 == 0:
        return divisor
    return None


@functools.cache
def _reduction_at(func: OpOverload) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("reduction") if "reduction" in names else None


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
        those over [rows, ...], where each row weighs the same; nor for means of each single row.
        """
        last, self._last = self._last, (tower, rows, means)
        if last is None or self._has_warned:
            return
        before, rows_before, means_before = last
        if [each.over for each in means] != [each.over for each in means_before]:
            return
        counts = Counter(each.over for each in means)
        for old, new in zip(means_before, means, strict=True):
            is_alike = new.divisor == old.divisor or new.divisor * rows_before == old.divisor * rows
            is_over_rows = (old.length, new.length) == (rows_before, rows)
            is_of_each_row = counts[new.over] >= rows > 1
            if not (is_alike or is_over_rows or is_of_each_row):
                self._has_warned = True
                _warn(new.over, [(before, old.divisor), (tower, new.divisor)])
                return


def _warn(over: str, found: Sequence[tuple[str, float]]) -> None:
    numbers = ", ".join(f"{divisor:g} in {tower}" for tower, divisor in found)
    what, _, _ = over.partition(",")
    warn(
        f"a loss is a mean over {over}: {numbers}. Towers are weighted by their rows, so {what} do not all "
        "weigh the same; if they should, pass their sum and their number, or the sum of their weights: "
        "tower.backward_sum(total, count), or return a samestep.LossSum from a Step's loss_fn"
    )
