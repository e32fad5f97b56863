"""The parameters of a model as hashes, by name: what workers compare where no step does."""

from __future__ import annotations

import torch
from torch import nn

from samestep.buffers.named_buffers import NamedBuffer, find_named_parameters
from samestep.watching.weight_hash import WeightHash

__all__ = ["hashes_of"]


def hashes_of(model: nn.Module) -> dict[str, list[int]]:
    """Return hashes of all parameters, by name."""
    held = list(filter(_has_memory, find_named_parameters(model)))
    hashes: dict[str, list[int]] = {}
    for piece in WeightHash(held, (), ()).of_all():
        for name, value in piece.items():
            hashes.setdefault(name, []).append(value)
    return hashes


def _has_memory(place: NamedBuffer) -> bool:
    """Whether a parameter's bytes can be read; those of other classes may have no memory of their own."""
    parameter = place.get()
    return type(parameter) is nn.Parameter and not parameter.is_meta and parameter.layout == torch.strided
