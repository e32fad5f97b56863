"""Nests: mappings, lists, tuples and dataclasses, taken apart and rebuilt with other entries.

Unlike torch's pytree, which treats a container of an unregistered type as a value, this treats every mapping
and dataclass as a nest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["NUMBERS", "PLAIN", "are_same", "entries", "is_sequence", "mapped", "rebuilt", "tensors"]

NUMBERS = (type(None), bool, int, float, complex, np.generic, torch.dtype, torch.device)
PLAIN = (*NUMBERS, str, bytes, Enum)


def entries(value: Any) -> dict[Any, Any] | None:
    """Return a nest's entries, by key, attribute or index; None if the value is no nest.

    What torch's functions take as a tensor is none: a TensorDict is a mapping, but iterates over its rows.
    """
    if hasattr(type(value), "__torch_function__"):
        return None
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, list | tuple):
        return None if isinstance(value, PackedSequence) else dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def rebuilt(nest: Any, new: Mapping[Any, Any]) -> Any:
    """Return a nest of the same type with other entries."""
    if isinstance(nest, tuple):
        return _rebuilt_tuple(nest, new.values())
    if type(nest) is dict or (isinstance(nest, Mapping) and not isinstance(nest, MutableMapping)):
        return dict(new)
    own = copy.copy(nest)
    if isinstance(nest, list):
        own[:] = new.values()
    for key, value in () if isinstance(nest, list) else new.items():
        if isinstance(nest, Mapping):
            own[key] = value
        else:
            object.__setattr__(own, key, value)  # frozen dataclasses too
    return own


def _rebuilt_tuple(nest: tuple[Any, ...], new: Iterable[Any]) -> Any:
    if hasattr(nest, "_make"):
        return nest._make(new)
    if not isinstance(type(nest).__new__, FunctionType):
        return type(nest)(new)
    own = tuple.__new__(type(nest), new)  # its own __new__ may take anything
    if hasattr(own, "__dict__"):
        own.__dict__.update(nest.__dict__)
    return own


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nest with `function` applied to each tensor and array; other values stay as they are."""
    if isinstance(value, Tensor | np.ndarray):
        return function(value)
    held = None if isinstance(value, PLAIN) else entries(value)
    if not held:
        return value
    return rebuilt(value, {key: mapped(function, entry) for key, entry in held.items()})


def tensors(value: Any) -> Iterator[Tensor | NDArray[Any]]:
    """Iterate over all tensors and arrays in a nest."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif not isinstance(value, PLAIN):
        for entry in (entries(value) or {}).values():
            yield from tensors(entry)


def are_same(one: Any, other: Any) -> bool:
    """Whether two nests hold the same plain values, tensors and arrays; False if they hold others, too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, PLAIN):
        return repr(one) == repr(other)  # NaN is the same
    these, those = entries(one), entries(other)
    if these is None or those is None or list(these) != list(those):
        return False
    return all(map(are_same, these.values(), those.values()))


def is_sequence(value: Any) -> bool:
    """Whether a value is a list or a tuple without names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")
