"""How a gradient lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """How a gradient lies in memory: the shape of its parameter, dense strides, and its own dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype) -> Layout:
        """Return the layout of a parameter's gradient that is summed in `dtype`.

        Autograd gives it the strides of the parameter where those are dense, and row-major ones elsewhere. A
        complex one that is summed in a real dtype has its two parts as a last dimension.
        """
        strides = torch.empty_like(parameter, device="meta").stride()
        if strides != parameter.stride():
            strides = torch.empty(parameter.shape, device="meta").stride()
        if parameter.is_complex() and not dtype.is_complex:
            return cls((*parameter.shape, 2), (*(2 * stride for stride in strides), 1), dtype)
        return cls(tuple(parameter.shape), tuple(strides), dtype)

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()
