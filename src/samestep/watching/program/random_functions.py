"""The functions that draw from generators of the process, which each tower's pass has seeded for it."""

from __future__ import annotations

import random
from types import BuiltinFunctionType, MethodType

import numpy as np
import torch

__all__ = ["is_random"]

_GENERATORS = tuple(vars(module)["random"].__self__ for module in (random, np.random))
_OF_TORCH = {
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.rand,
    torch.rand_like,
    torch.randint,
    torch.randint_like,
    torch.randn,
    torch.randn_like,
    torch.randperm,
}


def is_random(function: object) -> bool:
    """Say whether this draws random numbers: a function of torch, or of Python's or NumPy's own generator."""
    if not isinstance(function, (BuiltinFunctionType, MethodType)):
        return False
    return function in _OF_TORCH or any(function.__self__ is each for each in _GENERATORS)
