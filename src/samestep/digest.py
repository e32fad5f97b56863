"""SHA-256 of a model's weights: how "the same bits" is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["digest"]


def digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all weights, as 64 hexadecimal digits.

    Hashed are, in order of name, each tensor's name, shape, dtype and bytes (row-major, whatever its
    memory format; little-endian). The tensors are those of `model.state_dict()`: parameters and
    persistent buffers.

    Args:
        model: a module, or a mapping from names to tensors of any dtype on any device.

    Example:
        >>> digest({"weight": torch.zeros(2)})[:16]
        '93100c8e2288b19c'
    """
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):  # a module's extra state
            continue
        sha256.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha256.update(flat.view(torch.uint8).numpy().data)
    return sha256.hexdigest()
