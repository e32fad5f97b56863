"""Reads the values of tensors in order to compare them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from samestep.identity import checksum_of
from samestep.watching.operators.origins import is_dense

__all__ = ["MOST_ELEMENTS", "checksum_of_value", "is_readable"]

MOST_ELEMENTS = 2**16
"""Of larger tensors, about this many elements are compared."""


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory as its strides say, and a GPU may be waited for."""
    if is_lazy(tensor):
        return False
    is_known = tensor.is_cpu or (tensor.is_cuda and not torch.cuda.is_current_stream_capturing())
    return is_known and is_dense(tensor) and not tensor.is_quantized and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are in memory: not the zeros of forward mode, nor what `vmap` maps."""
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def checksum_of_value(tensor: Tensor) -> int:
    """Return a hash of a tensor that is readable."""
    values = tensor.detach().contiguous().view(-1)
    return checksum_of(values[:: max(1, len(values) // MOST_ELEMENTS)].cpu().contiguous())
