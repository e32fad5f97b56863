"""Finds a forward that computes something different when it is repeated on the same rows and streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Repeated"]

_MOST_VALUES = 4096
_PART, _PART_OF_HALF = 0.001, 0.05
"""The largest allowed difference, relative to the largest value; the second is for half precision.

It is not 0, because kernels may round differently with and without grad.
"""


class Repeated:
    """Some values of each output of a forward, to compare with the outputs of its repetition."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._values = [_some(tensor) for tensor in outputs]

    def difference(self, outputs: Sequence[Tensor]) -> str | None:
        """Say which output has changed, and by how much, given outputs of the same shapes and dtypes."""
        for number, (before, tensor) in enumerate(zip(self._values, outputs, strict=True)):
            now = _some(tensor)
            if torch.equal(before, now):
                continue
            if not torch.equal(before.isfinite(), now.isfinite()):
                return f"tensor {number} of its outputs, where some values are finite in only one pass"
            largest = float(torch.where(before.isfinite(), before, 0).abs().max())
            apart = float((now - before).abs().nan_to_num(0, 0, 0).max())
            if apart > _tolerance(tensor) * largest:
                return (
                    f"tensor {number} of its outputs by up to {apart:.3g}; the largest value is {largest:.3g}"
                )
        return None


def _some(tensor: Tensor) -> Tensor:
    """Return about 4,096 elements, as float64 or complex128, in memory of their own."""
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _MOST_VALUES)]
    return values.to(torch.complex128 if values.is_complex() else torch.float64, copy=True)


def _tolerance(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    is_half = tensor.dtype.itemsize < 4 or torch.is_autocast_enabled(tensor.device.type)
    return _PART_OF_HALF if is_half else _PART
