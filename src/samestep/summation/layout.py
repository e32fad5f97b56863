"""Shapes, strides and dtypes of gradients, and where elements of tensors are in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "in_order", "is_dense", "unexpanded"]


@dataclass(frozen=True)
class Layout:
    """The memory layout of a gradient: the shape of its parameter, dense strides, and its own dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype) -> Layout:
        """Return the layout of a parameter's gradient that is summed in `dtype`.

        Autograd gives a gradient its parameter's strides if these are dense, otherwise row-major strides. A
        complex gradient that is summed in a real dtype has real and imaginary parts as a last dimension.
        """
        strides = parameter.stride()
        if not is_dense(parameter):
            strides = torch.empty(parameter.shape, device="meta").stride()
        if parameter.is_complex() and not dtype.is_complex:
            return cls((*parameter.shape, 2), (*(2 * stride for stride in strides), 1), dtype)
        return cls(tuple(parameter.shape), tuple(strides), dtype)

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps, in any order."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor's elements, flat, in the order of these dense strides; a view if they are its own."""
    if tensor.stride() != strides:
        own = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = own.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def unexpanded(tensor: Tensor) -> Tensor:
    """Return a view with each memory location of an expanded tensor only once, so that it can be written."""
    tensor = tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
