"""Finds random generators of a model's own: they go on from tower to tower, where towers share a worker."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["OwnGenerators", "state_of"]

_methods: tuple[Any, ...] = (random.random, np.random.rand)
_GLOBAL = {id(torch.default_generator), *(id(method.__self__) for method in _methods)}


def state_of(value: Any) -> str | None:
    """Return the state of a random generator, None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes().hex()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


class OwnGenerators:
    """The generators that the modules of a model have as attributes."""

    def __init__(self, model: nn.Module) -> None:
        found = [
            (f"{attribute} of {name or 'the model'}", value)
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
        ]
        self._held = [
            (name, value) for name, value in found if id(value) not in _GLOBAL and state_of(value) is not None
        ]
        self._before: list[str | None] = []

    def note(self) -> None:
        """Note their states before a pass."""
        self._before = [state_of(value) for _, value in self._held]

    def check(self) -> None:
        """Warn, once, of those that a pass has drawn from."""
        pairs = zip(self._held, self._before, strict=True)
        drawn = [name for (name, value), old in pairs if state_of(value) != old]
        if drawn:
            self._held = []
            warnings.warn(
                f"a pass drew from {', '.join(drawn)}, a random generator of its own, which goes on from "
                "tower to tower of a worker: draw from the global generators of torch, random or np.random, "
                "which are seeded for each, unless each pass seeds it",
                stacklevel=2,
            )
