"""Finds what a pass divides its loss by: the sum of its labels' class weights, or a number of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Divisor", "divisor_of"]

aten = torch.ops.aten

_MEAN = 1  # torch's number for reduction="mean"
_WEIGHTED = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


class Divisor(NamedTuple):
    """What a sum was divided by: a description for messages, and the value."""

    what: str
    value: float


def divisor_of(func: Any, args: Sequence[Any], result: Any) -> Divisor | None:
    """Return what an operator divides a sum by, if it may be a count that differs between towers.

    Only positive whole numbers count, not other divisors, such as another loss.
    """
    if func in _WEIGHTED and args[2] is not None and args[3] == _MEAN:
        return Divisor("the weights of its labels", float(result[1]))
    if func is not aten.div.Tensor or not isinstance(args[1], Tensor):
        return None
    total, count = args[:2]
    if not isinstance(total, Tensor) or not total.requires_grad or total.numel() != 1 or count.numel() != 1:
        return None
    value = float("nan") if count.requires_grad or count.is_complex() else float(count)
    is_count = math.isfinite(value) and value >= 1 and value == int(value)
    return Divisor("a count of its own", value) if is_count else None
