"""A 32-bit number that identifies a batch, by its values on the CPU, shapes, dtypes and names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.batches.columns import Branch, Column, Node, Whole
from samestep.batches.nest import entries
from samestep.identity import checksum, checksum_of

__all__ = ["fingerprint"]


def fingerprint(node: Node) -> int:
    """Return the number: the same in every process, whatever the memory layout.

    Values on a GPU are left out, because reading them would make the host wait for the GPU. Objects that are
    not made of numbers, strings and tensors count with the name of their type only, and so do those that hold
    themselves.
    """
    try:
        text = json.dumps(_outline(node), default=_described, skipkeys=True)
    except (ValueError, RecursionError):
        text = type(_outline(node)).__name__
    return zlib.crc32(text.encode())


def _outline(node: Node) -> Any:
    if isinstance(node, Branch):
        keys = sorted(node.children, key=lambda key: (str(key), type(key).__name__))  # 1 and "1" are two
        return [(str(key), _outline(node.children[key])) for key in keys]
    assert isinstance(node, Column | Whole)
    return node.value


def _described(value: Any) -> Any:
    """Describe a value of a type that JSON does not support."""
    if isinstance(value, Tensor):
        # A nested tensor's other sizes differ by row, and a strided one has no shape.
        shape = ["nested", value.size(0)] if value.is_nested else list(value.shape)
        return [str(value.dtype), shape, _crc_of_tensor(value)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, _crc_of_array(value)]
    if isinstance(value, bytes):
        return zlib.crc32(value)
    if isinstance(value, complex | np.generic | Enum | torch.dtype | torch.device):
        return [type(value).__name__, str(value)]
    held = entries(value)
    if held is not None:
        return held if isinstance(value, Mapping) else [type(value).__name__, held]
    return type(value).__name__


def _crc_of_tensor(tensor: Tensor) -> int | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return None
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return checksum_of(values)


def _crc_of_array(array: NDArray[Any]) -> int:
    if array.dtype.hasobject:
        return zlib.crc32(json.dumps(array.tolist(), default=_described, skipkeys=True).encode())
    return checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
