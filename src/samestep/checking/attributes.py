"""What a model holds besides parameters, and its code refers to: state that may differ between workers."""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.identity import digest

__all__ = ["Held", "Place", "fingerprint", "held_by", "module_names", "outside_tensors"]

Kind = Literal["value", "values", "tensor", "buffer", "random stream"]

_OWN = frozenset(vars(nn.Module()))  # what every module has, such as its hooks
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_MAX_TEXT = 40
_MAX_DEPTH = 3
_MAX_ITEMS = 1000


class Place(NamedTuple):
    """Where something is held: by whom, and under which name."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.owner}"


@dataclass(frozen=True)
class Held:
    """Something held, in a form that can be compared: a digest, or for a "value" the short text of it."""

    kind: Kind
    value: str


def fingerprint(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that tell tensors apart by shape, dtype and bytes."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return digest({"": tensor.resolve_conj().resolve_neg()})[:16]
    if tensor.layout is torch.sparse_coo:
        return digest({"indices": tensor._indices(), "values": tensor._values()})[:16]
    return digest({"": tensor.to_dense()})[:16]


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return what to call each module: its path and its class."""
    kind = type(model).__name__
    return {
        module: f"{path} ({type(module).__name__})" if path else f"the model ({kind})"
        for path, module in model.named_modules()
    }


def held_by(model: nn.Module, loss_fn: Callable[..., Any]) -> dict[Place, Held]:
    """Describe what modules and loss function hold: numbers, tensors, generators, and nests of them.

    Left out are parameters, the buffers that samestep averages, and whatever cannot be compared by value.
    """
    described = ((place, _describe(value)) for place, value in _all_held(model, loss_fn))
    found = {place: held for place, held in described if held is not None}
    for place, buffer in _watched_buffers(model):
        found[place] = Held("buffer", fingerprint(buffer))
    return found


def outside_tensors(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors that a pass may find rather than make, and what to call them."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for place, value in _all_held(model, loss_fn):
        for tensor in _tensors_in(value):
            yield str(place), tensor


def _all_held(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    for owner, variables in _attributes_of(model):
        yield from ((Place(owner, name), value) for name, value in variables.items())
    functions: dict[Callable[..., Any], None] = {}
    for owner, function in _code_of(model, loss_fn):
        for value, name in _parts_of(function):
            if inspect.isfunction(value):
                functions[value] = None
            elif not isinstance(value, nn.Module):
                yield Place(owner, name), value
    for function in functions:
        yield from _referred_to(function)


def _attributes_of(model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what modules hold beside torch's own attributes, and what their classes hold."""
    for module, owner in module_names(model).items():
        names = [name for name in vars(module) if not name.startswith("_torchdynamo")]
        yield owner, {n: vars(module)[n] for n in names if n == "training" or n not in _OWN}
    for kind in dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__):
        if not kind.__module__.startswith(("torch.", "builtins")):
            yield f"the class {kind.__qualname__}", vars(kind)


def _code_of(model: nn.Module, loss_fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a pass calls, by owner: forwards, the user's hooks on them, and the loss function."""
    for module, owner in module_names(model).items():
        yield owner, type(module).forward
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith(("torch.", "samestep.")):
                yield f"a hook of {owner}", hook
    yield "the loss function", loss_fn


def _parts_of(function: Any) -> Iterator[tuple[Any, str]]:
    """Take a callable apart into plain functions and what is bound to them."""
    if isinstance(function, functools.partial):
        yield from _parts_of(function.func)
        yield from ((value, f"argument {n}") for n, value in enumerate(function.args))
        yield from ((value, name) for name, value in function.keywords.items())
    elif inspect.ismethod(function):
        yield function.__func__, ""
        yield from ((value, name) for name, value in getattr(function.__self__, "__dict__", {}).items())
    elif inspect.isfunction(function):
        yield function, ""
    else:
        yield inspect.getattr_static(function, "__call__", None), ""
        yield from ((value, name) for name, value in getattr(function, "__dict__", {}).items())


def _referred_to(function: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the globals and the enclosing variables that a function of the user's refers to."""
    if (function.__module__ or "").startswith("torch."):
        return
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable of the enclosing function that is not set
        return
    for name, value in variables.nonlocals.items():
        yield Place(f"the function around {function.__qualname__}", name), value
    for name, value in variables.globals.items():
        yield Place(f"the Python module {function.__module__}", name), value


def _watched_buffers(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Yield the buffers of other than normalisation layers, except counters."""
    for module, owner in module_names(model).items():
        if not isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.numel() != 1 or buffer.is_floating_point():
                    yield Place(owner, name), buffer


def _describe(value: Any, depth: int = 0) -> Held | None:
    if isinstance(value, _PLAIN):
        text = repr(value)
        return Held("value", text) if len(text) <= _MAX_TEXT else Held("values", _hash([text]))
    if isinstance(value, Tensor):
        # What has a graph is left over from a pass, and was made in it.
        is_state = not isinstance(value, nn.Parameter) and value.grad_fn is None and not value.is_meta
        return Held("tensor", fingerprint(value)) if is_state else None
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else Held("tensor", _hash_array(value))
    state = _stream_state(value)
    if state is not None:
        return Held("random stream", _hash([state]))
    return _describe_nest(value, depth)


def _stream_state(value: Any) -> str | None:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes().hex()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


def _describe_nest(value: Any, depth: int) -> Held | None:
    items = _items(value)
    if items is None or depth == _MAX_DEPTH:
        return None
    described = [
        (repr(name) if isinstance(name, _PLAIN) else "", _describe(item, depth + 1)) for name, item in items
    ]
    parts = [(name, held) for name, held in described if held is not None]
    kinds: list[Kind] = [held.kind for _, held in parts]
    odd: list[Kind] = [kind for kind in kinds if kind not in ("value", "values")]
    return Held(odd[0] if odd else "values", _hash([f"{name} {held.value}" for name, held in parts]))


def _items(value: Any) -> Iterable[tuple[object, Any]] | None:
    """Return the named parts of a nest; None for what is none, or too big to look through."""
    if isinstance(value, Mapping):
        return list(value.items()) if len(value) <= _MAX_ITEMS else None
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value)) if len(value) <= _MAX_ITEMS else None
    if isinstance(value, (set, frozenset)):
        plain = sorted(repr(item) for item in value if isinstance(item, _PLAIN))
        return list(enumerate(plain)) if len(value) <= _MAX_ITEMS else None
    is_code = isinstance(value, (nn.Module, type)) or inspect.isroutine(value) or inspect.ismodule(value)
    return None if is_code or not hasattr(value, "__dict__") else list(vars(value).items())


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        for _, item in _items(value) or ():
            yield from _tensors_in(item, depth + 1)


def _hash_array(array: np.ndarray[Any, Any]) -> str:
    sha256 = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()[:16]


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
