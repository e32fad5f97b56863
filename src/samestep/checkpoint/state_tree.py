"""Nested state <-> JSON (the outline) and named tensors. Unlike pickle, reading them cannot run code.

Numbers, strings, booleans, None, lists and dicts with string keys stay as they are in the outline. Anything
else becomes an object with a key that begins with `$`:

    {"$tensor": name, "order": [0, 2, 3, 1]}    a tensor; its axes' order in memory, if not row-major
    {"$tuple": [...]}                           a tuple
    {"$dict": [[key, value], ...]}              a dict with other keys, such as an optimizer's ints
    {"$counter": [[key, count], ...]}           a collections.Counter, as in MultiStepLR
    {"$float": "inf"}                           a number that JSON cannot hold
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from samestep.errors import ConfigError, one_line, shown

__all__ = ["check_values", "from_outline", "to_outline"]


def to_outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the outline of a nest, and add its tensors to `tensors`, without copying them.

    Args:
        value: numbers, strings, booleans, None, tensors, and lists, tuples and dicts of them.
        name: the nest's name, for messages and as the prefix of its tensors' names.
        tensors: the dict to add to.

    Raises:
        ConfigError: the nest holds something else.

    Example:
        >>> tensors = {}
        >>> to_outline({"lr": 0.1, "betas": (0.9, math.inf), "buffer": torch.zeros(2)}, "optimizer", tensors)
        {'lr': 0.1, 'betas': {'$tuple': [0.9, {'$float': 'inf'}]}, 'buffer': {'$tensor': 'optimizer.buffer'}}
        >>> tensors
        {'optimizer.buffer': tensor([0., 0.])}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return _outline_tensor(value, name, tensors)
    if type(value) in (list, tuple, torch.Size):
        items = [to_outline(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _outline_dict(value, name, tensors)
    raise ConfigError(f"{name} is {_kind_and_remedy(value, name)}")


def _kind_and_remedy(value: Any, name: str) -> str:
    kind = type(value).__name__
    if hasattr(value, "state_dict"):
        own = name.replace(".", "_")
        return f"a {kind} inside another value: pass it to save and load by itself, as {own}=..."
    if isinstance(value, np.generic):
        return (
            f"a number of NumPy, {kind}: expected Python's, as its item() returns, or a tensor of its dtype"
        )
    if isinstance(value, np.ndarray):
        return "an array of NumPy: expected a tensor, as torch.from_numpy returns"
    return (
        f"a {kind}: a checkpoint holds objects with a state_dict, and numbers, strings, tensors, and lists, "
        "tuples and dicts of these"
    )


def _outline_dict(value: dict[Any, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    items = [(key, to_outline(item, f"{name}.{key}", tensors)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[to_outline(key, name, {}), count] for key, count in items]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {"$dict": [[to_outline(key, name, {}), item] for key, item in items]}


def check_values(name: str, tensor: Tensor) -> None:
    """Raise a ConfigError if a tensor has no values to write."""
    if tensor.is_meta or is_lazy(tensor):
        why = "it is on the meta device" if tensor.is_meta else "its layer is lazy and has not run yet"
        raise ConfigError(f"{name} has no values, because {why}: give it some first, or leave it out")


def _outline_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    check_values(name, tensor)
    while name in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
        name += "'"
    tensors[name] = tensor
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    is_dense = tensor.layout == torch.strided and tensor.permute(order).is_contiguous()
    return {"$tensor": name} | ({"order": order} if is_dense and not tensor.is_contiguous() else {})


def from_outline(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nest of an outline, as passed to `to_outline`.

    Raises:
        ValueError: this is not an outline, or a tensor is missing, left over or used twice.

    Example:
        >>> from_outline({"$dict": [[0, {"$tensor": "a"}], [1, {"$tuple": []}]]}, {"a": torch.zeros(2)})
        {0: tensor([0., 0.]), 1: ()}
    """
    left = dict(tensors)
    try:
        value = _value(outline, left)
    except (ArithmeticError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"it is not a state that samestep writes ({one_line(repr(error))})") from error
    if left:
        raise ValueError(
            f"it lacks {len(left)} of the tensors that were saved, the first is {shown(min(left))}"
        )
    return value


def _value(outline: Any, left: dict[str, Tensor]) -> Any:
    if isinstance(outline, list):
        return [_value(item, left) for item in outline]
    if not isinstance(outline, dict):
        return outline
    if not any(key.startswith("$") for key in outline):
        return {key: _value(item, left) for key, item in outline.items()}
    match outline:
        case {"$tensor": str(name), **layout} if layout.keys() <= {"order"}:
            return _ordered(left.pop(name), layout.get("order"))
        case {"$tuple": list(items), **others} if not others:
            return tuple(_value(item, left) for item in items)
        case {"$dict": list(items), **others} if not others:
            return {_value(key, left): _value(item, left) for key, item in items}
        case {"$counter": list(items), **others} if not others:
            return Counter({_value(key, left): operator.index(count) for key, count in items})
        case {"$float": "inf" | "-inf" | "nan" as value, **others} if not others:
            return float(value)
    raise ValueError(f"it is not a state that samestep writes ({shown(outline, 200)})")


def _ordered(tensor: Tensor, order: list[int] | None) -> Tensor:
    """Return the tensor, with axes laid out in memory in `order`, slowest first."""
    if order is None:
        return tensor
    if sorted(order) != list(range(tensor.ndim)):
        raise ValueError(f"{shown(order)} is not an order of {tensor.ndim} axes")
    inverse = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)
