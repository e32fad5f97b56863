"""Histograms of tensors, computed on the tensor's device, in TensorBoard's format."""

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

_NUM_BINS = 30  # TensorBoard draws as many
_PIECE = 1 << 18  # values counted at a time, so that float64 copies are small and stay in the cache


@dataclass(frozen=True)
class Histogram:
    """Counts of finite values in bins of equal width between the smallest and the largest value.

    Attributes:
        lowest: the smallest finite value.
        highest: the largest finite value.
        total: the sum of the finite values.
        squares: the sum of their squares.
        counts: number of values in each bin; the last bin includes `highest`.
    """

    lowest: float
    highest: float
    total: float
    squares: float
    counts: Sequence[int]

    @classmethod
    def of(cls, values: Tensor) -> Histogram | None:
        """Compute the histogram of a tensor's finite values, on its device; None if there are none."""
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
        """Return TensorBoard's protocol buffer for this histogram."""
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
    """Return a tensor's values as [n]: the stored ones of a sparse tensor, magnitudes of complex numbers."""
    values = values.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return (values.abs() if values.is_complex() else values).reshape(-1)


def _count(values: Tensor, lowest: float, width: float) -> Tensor:
    """Return the number of values, float64 [n], in each bin, int64 [bins]."""
    # Not histc: it takes ten times as long on a CPU, and is nondeterministic on a GPU.
    shares = (values - lowest).div_(width if 0 < width < math.inf else 1.0)
    return torch.bincount(shares.mul_(_NUM_BINS).clamp_(0, _NUM_BINS - 1).int(), minlength=_NUM_BINS)
