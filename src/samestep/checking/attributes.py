"""State besides parameters that may differ between workers: what the model holds, and its code refers to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.checking.surroundings import PLAIN, Place, Surroundings, items_of
from samestep.identity import digest
from samestep.watching.model.own_generators import state_of

__all__ = ["Held", "fingerprint", "held_by"]

Kind = Literal["value", "values", "tensor", "buffer", "random stream"]

_MAX_TEXT = 40
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Held:
    """A held object in a form that can be compared: a digest or, for kind "value", its short text."""

    kind: Kind
    value: str


def fingerprint(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, dtype and bytes, as 16 hexadecimal digits."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return digest({"": tensor.resolve_conj().resolve_neg()})[:16]
    if tensor.layout is torch.sparse_coo:
        return digest({"indices": tensor._indices(), "values": tensor._values()})[:16]
    return digest({"": tensor.to_dense()})[:16]


def held_by(surroundings: Surroundings, model: nn.Module) -> dict[Place, Held]:
    """Describe the numbers, tensors and generators that are held, and nests of them.

    This leaves out the model's parameters, buffers that samestep averages, and objects that cannot be
    compared by value.
    """
    own = frozenset(map(id, model.parameters()))
    described = ((place, _describe(value, own)) for place, value in surroundings.held.items())
    found = {place: held for place, held in described if held is not None}
    for module in model.modules():
        if not isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.numel() != 1 or buffer.is_floating_point():
                    found[Place(surroundings.modules[module], name)] = Held("buffer", fingerprint(buffer))
    return found


def _describe(value: Any, own: frozenset[int], depth: int = 0) -> Held | None:
    if isinstance(value, PLAIN):
        text = repr(value.item() if isinstance(value, np.generic) else value)
        text = text.replace("__mp_main__", "__main__")  # the script's name in spawned workers
        return Held("value", text) if len(text) <= _MAX_TEXT else Held("values", _hash([text]))
    if isinstance(value, Tensor):
        # A tensor with a graph is a leftover that the last pass made.
        is_state = id(value) not in own and value.grad_fn is None and not value.is_meta
        return Held("tensor", fingerprint(value)) if is_state else None
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else Held("tensor", _hash_array(value))
    state = state_of(value)
    if state is not None:
        return Held("random stream", _hash([repr(state)]))
    return _describe_nest(value, own, depth)


def _describe_nest(value: Any, own: frozenset[int], depth: int) -> Held | None:
    items = items_of(value)
    if items is None or depth == _MAX_DEPTH:
        return None
    described = [
        (repr(name) if isinstance(name, PLAIN) else "", _describe(item, own, depth + 1))
        for name, item in items
    ]
    parts = [(name, held) for name, held in described if held is not None]
    kinds: list[Kind] = [held.kind for _, held in parts]
    odd: list[Kind] = [kind for kind in kinds if kind not in ("value", "values")]
    return Held(odd[0] if odd else "values", _hash([f"{name} {held.value}" for name, held in parts]))


def _hash_array(array: np.ndarray[Any, Any]) -> str:
    sha256 = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()[:16]


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
