"""Histograms of tensors, counted where they are and written as TensorBoard wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

__all__ = ["Histogram"]

_NUM_BINS = 30  # as many as TensorBoard draws
_PIECE = 1 << 18  # values counted at a time: they stay in the cache, and no copy is larger


@dataclass(frozen=True)
class Histogram:
    """How often values fall into equal bins between the smallest and the largest.

    Attributes:
        lowest: the smallest finite value.
        highest: the largest.
        total: the sum of the values.
        squares: the sum of their squares.
        counts: values in each bin; the last one includes `highest`.
    """

    lowest: float
    highest: float
    total: float
    squares: float
    counts: Sequence[int]

    @classmethod
    def of(cls, values: Tensor) -> Histogram | None:
        """Count a tensor's finite values, on its own device; None where there are none."""
        values = _flat(values)
        if values.numel() and not bool(values.isfinite().all()):
            values = values[values.isfinite()]
        if not values.numel():
            return None
        lowest, highest = (float(bound) for bound in values.aminmax())
        counts = torch.zeros(_NUM_BINS, dtype=torch.int64, device=values.device)
        sums = torch.zeros(2, dtype=torch.float64, device=values.device)
        for piece in values.split(_PIECE):
            exact = piece.double()
            sums += torch.stack([exact.sum(), exact.dot(exact)])
            counts += _count(exact, lowest, highest - lowest)
        total, squares = sums.tolist()
        return cls(lowest, highest, total, squares, counts.tolist())

    def summary(self, tag: str) -> Summary:
        """Return it under a tag, as TensorBoard's files hold it."""
        from torch.utils.tensorboard.summary import histogram_raw

        width = (self.highest - self.lowest) / len(self.counts)
        return histogram_raw(
            tag,
            min=self.lowest,
            max=self.highest,
            num=sum(self.counts),
            sum=self.total,
            sum_squares=self.squares,
            bucket_limits=[self.lowest + width * (index + 1) for index in range(len(self.counts))],
            bucket_counts=list(self.counts),
        )


def _flat(values: Tensor) -> Tensor:
    """Return a tensor's values in one row: a sparse one's stored values, the size of complex ones."""
    values = values.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return (values.abs() if values.is_complex() else values).reshape(-1)


def _count(values: Tensor, lowest: float, width: float) -> Tensor:
    """Return how many values, float64 [n], are in each bin, int64 [bins]."""
    # Not histc: on the CPU it takes ten times as long, and on a GPU it is no deterministic algorithm.
    shares = (values - lowest).div_(width if 0 < width < math.inf else 1.0)
    return torch.bincount(shares.mul_(_NUM_BINS).clamp_(0, _NUM_BINS - 1).int(), minlength=_NUM_BINS)
