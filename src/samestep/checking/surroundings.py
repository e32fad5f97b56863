"""What a step can reach by name: modules, the optimizer, their variables, and what their code refers to."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.identity import plain_names

__all__ = ["LOSS_FUNCTION", "OPTIMIZER", "PLAIN", "Place", "Surroundings", "items_of"]

LOSS_FUNCTION = "the loss function"
OPTIMIZER = "the optimizer"
PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_OWN = frozenset(vars(nn.Module()))  # what every module has, such as its hooks
_STATE = ("state", "param_groups")
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_LIBRARIES = ("torch.", *(f"samestep.{name}." for name in ("checking", "towers", "buffers", "summation")))
_MAX_DEPTH = 3
_MAX_ITEMS = 1000


class Place(NamedTuple):
    """Where an object is held: its owner and its name there."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.owner}"


class Surroundings:
    """All that a model's forwards and hooks, its loss function and its optimizer can reach by name.

    Attributes:
        modules: names of modules, from path and class; the model's own come first.
        held: attributes of modules and of their classes, variables that code refers to, parameters and
            buffers of modules outside the model, and the optimizer's settings.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer) -> None:
        self._model = model
        self._functions: set[Callable[..., Any]] = set()
        self._own = set(model.modules())
        self.modules: dict[nn.Module, str] = {}
        self.held: dict[Place, Any] = {}
        self._add_modules(Place("", ""), model)
        self._add_code(LOSS_FUNCTION, loss_fn)
        self._add_optimizer(optimizer)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names of the leaves outside the model that may get a gradient, and the leaves."""
        for place, value in self.held.items():
            for tensor in _find(Tensor, value):
                if tensor.is_leaf and tensor.requires_grad:
                    yield str(place), tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names of all tensors that exist before a pass, and the tensors."""
        for place, value in self.held.items():
            for tensor in _find(Tensor, value):
                yield str(place), tensor
        for name, buffer in plain_names(dict(self._model.named_buffers())).items():
            yield f"buffer {name}", buffer
        for name, parameter in plain_names(dict(self._model.named_parameters())).items():
            yield f"parameter {name}", parameter

    def owners(self, names: Collection[str]) -> dict[str, str]:
        """Return the module of each of these parameters of the model, by name."""
        owners = {_plain(path): self.modules[module] for path, module in self._model.named_modules()}
        return {name: owners.get(name.rpartition(".")[0], "the model") for name in names}

    def _add_modules(self, place: Place, root: nn.Module) -> None:
        """Add a module and its submodules."""
        for path, module in root.named_modules():
            if module in self.modules:
                continue
            self.modules[module] = owner = _module_name(place, _plain(path), module)
            values = {n: v for n, v in vars(module).items() if n == "training" or n not in _OWN}
            if module not in self._own:
                values |= {**module._parameters, **module._buffers}
            self._add_object(owner, module, values)
            for hooked in (module, *module._parameters.values()):
                for kind in _HOOKS:
                    self._add_hooks(owner, getattr(hooked, kind, None))

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            settings = {f"{name} of group {number}": v for name, v in group.items() if name != "params"}
            self._hold(OPTIMIZER, settings)
        self._add_object(OPTIMIZER, optimizer, {n: v for n, v in vars(optimizer).items() if n not in _STATE})
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._add_hooks(OPTIMIZER, getattr(optimizer, kind))

    def _add_hooks(self, owner: str, hooks: Mapping[int, Any] | None) -> None:
        for hook in (hooks or {}).values():
            self._add_code(f"a hook of {owner}", hook)

    def _add_object(self, owner: str, value: Any, variables: Mapping[str, Any]) -> None:
        """Add an object's variables, and its classes' variables and methods."""
        self._hold(owner, variables)
        for kind in type(value).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                self._hold(f"the class {kind.__qualname__}", vars(kind))

    def _add_code(self, owner: str, function: Any) -> None:
        """Add something that a step calls: a function, a partial, a method or another object."""
        if _is_library(function):
            return
        if isinstance(function, functools.partial):
            self._hold(owner, {f"argument {n}": value for n, value in enumerate(function.args)})
            self._hold(owner, function.keywords)
            self._add_code(owner, function.func)
        elif inspect.ismethod(function):
            self._add_function(function.__func__, 0)
            self._add_code(owner, function.__self__)
        elif inspect.isfunction(function):
            self._add_function(function, 0)
        elif isinstance(function, nn.Module):
            self._add_modules(Place(owner, ""), function)
        elif hasattr(function, "__dict__"):
            self._add_object(owner, function, vars(function))

    def _add_function(self, function: Callable[..., Any], depth: int) -> None:
        """Add the globals and enclosing variables that a user's function refers to."""
        if function in self._functions or _is_library(function):
            return
        self._functions.add(function)
        try:
            variables = inspect.getclosurevars(function)
        except ValueError:  # a variable of the enclosing function is not set yet
            return
        # Spawned workers import the script under another name.
        module = (function.__module__ or "").replace("__mp_main__", "__main__")
        self._hold(f"the function around {function.__qualname__}", variables.nonlocals, depth)
        self._hold(f"the Python module {module}", variables.globals, depth)

    def _hold(self, owner: str, variables: Mapping[str, Any], depth: int = 0) -> None:
        for name, value in variables.items():
            if name.startswith("__") or name.startswith("_torchdynamo"):
                continue
            if inspect.isfunction(value):
                if depth < _MAX_DEPTH:
                    self._add_function(value, depth + 1)
            elif not isinstance(value, nn.Module):
                self.held.setdefault(Place(owner, name), value)
            for module in _find(nn.Module, value):
                if module not in self.modules:
                    self._add_modules(Place(owner, name), module)


def _is_library(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


def _plain(path: str) -> str:
    return next(iter(plain_names({path: None})))


def _module_name(place: Place, path: str, module: nn.Module) -> str:
    name = ".".join(filter(None, (place.name, path)))
    owner = f" of {place.owner}" if name and place.owner else ""
    return f"{name or place.owner or 'the model'} ({type(module).__name__}){owner}"


def items_of(value: Any) -> Iterable[tuple[object, Any]] | None:
    """Return the named parts of a nest; None for anything else, and for nests that are too large."""
    if isinstance(value, Mapping):
        return list(value.items()) if len(value) <= _MAX_ITEMS else None
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value)) if len(value) <= _MAX_ITEMS else None
    if isinstance(value, (set, frozenset)):
        plain = sorted(repr(item) for item in value if isinstance(item, PLAIN))
        return list(enumerate(plain)) if len(value) <= _MAX_ITEMS else None
    is_code = (
        isinstance(value, (nn.Module, type, logging.Logger))
        or inspect.isroutine(value)
        or inspect.ismodule(value)
    )
    return None if is_code or not hasattr(value, "__dict__") else list(vars(value).items())


def _find(kind: type[Any], value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield all objects of a type in a nest."""
    if isinstance(value, kind):
        yield value
    elif depth < _MAX_DEPTH:
        for _, item in items_of(value) or ():
            yield from _find(kind, item, depth + 1)
