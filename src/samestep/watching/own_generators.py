"""Finds random generators of a program's own: they go on from tower to tower, where towers share a worker."""

from __future__ import annotations

import inspect
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["OwnGenerators", "state_of"]

_methods: tuple[Any, ...] = (random.random, np.random.rand)
_GLOBAL = {id(torch.default_generator), *(id(method.__self__) for method in _methods)}
_KINDS = (random.Random, np.random.Generator, np.random.RandomState)
_EMPTY = CellType()
_MOST_FRAMES = 10
_MOST_VALUES = 500
_MOST_PARTS = 64
_LIBRARIES = {"samestep", "torch", "numpy"}
_MOST_STEPS = 3
"""From what a function in progress refers to: to its attributes, to what a function among these refers to."""

_Named = tuple[str, Any]


def state_of(value: Any) -> str | None:
    """Return the state of a random generator, None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes().hex()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


class OwnGenerators:
    """The generators that a model's modules have, and those of Python and NumPy that passes can reach.

    Others of torch are seen when operators draw from them: see `FlowWatch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{attribute} of {name or 'the model'}", value)
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if _is_own(value)
        ]
        self._forwards = [(type(module).__name__, type(module).forward) for module in model.modules()]
        self._reached: list[_Named] = []
        self._before: list[str | None] = []
        self._has_told = False

    def start_step(self, *, searches: bool) -> None:
        """Search what the functions in progress can reach, if asked to."""
        self._reached = []
        if searches and not self._has_told:
            held = {id(value) for _, value in self._held}
            self._reached = [each for each in _in_reach(self._forwards) if id(each[1]) not in held]

    def note(self) -> None:
        """Note their states before a pass."""
        self._before = self._states()

    def check(self) -> None:
        """Warn, once, of those that a pass has drawn from."""
        triples = zip([*self._held, *self._reached], self._before, self._states(), strict=True)
        drawn = [name for (name, _), old, new in triples if new != old]
        if drawn:
            self._held, self._reached, self._before, self._has_told = [], [], [], True
            warnings.warn(
                f"a pass drew from {', '.join(drawn)}, a random generator of its own, which goes on from "
                "tower to tower of a worker: draw from the global generators of torch, random or np.random, "
                "which are seeded for each, unless each pass seeds it",
                stacklevel=2,
            )

    def _states(self) -> list[str | None]:
        return [state_of(value) for _, value in (*self._held, *self._reached)]


def _is_own(value: object) -> bool:
    return id(value) not in _GLOBAL and state_of(value) is not None


def _in_reach(functions: Iterable[_Named]) -> list[_Named]:
    """Return the generators of Python and NumPy that functions, and those in progress, refer to."""
    values = deque((*each, 0) for each in functions)
    frame = inspect.currentframe()
    for _ in range(_MOST_FRAMES):
        if frame is not None:
            named = [*frame.f_locals.items(), *_globals_of(frame.f_code, frame.f_globals)]
            values.extend((*each, 0) for each in named)
            frame = frame.f_back
    del frame  # its variables would hold it
    found: list[_Named] = []
    seen = set[int]()
    while values and len(seen) < _MOST_VALUES:
        name, value, steps = values.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), _KINDS):
            found.append((name, value))
        elif steps < _MOST_STEPS:
            with suppress(
                Exception
            ):  # strangers' objects may be anything, such as proxies of what is not there
                values.extend((*each, steps + 1) for each in islice(_parts(name, value), _MOST_PARTS))
    return [each for each in found if _is_own(each[1])]


def _globals_of(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[_Named]:
    """Yield the global names of a user's function, and those in modules among them, that are in its code."""
    if str(namespace.get("__name__")).partition(".")[0] in _LIBRARIES:
        return
    for name in code.co_names:
        value = namespace.get(name)
        if type(value) is ModuleType:
            inner = vars(value)
            yield from ((f"{name}.{each}", inner[each]) for each in code.co_names if each in inner)
        else:
            yield name, value


def _parts(name: str, value: Any) -> Iterator[_Named]:
    """Yield what a function refers to, or what an object holds."""
    kind = type(value)
    if kind is FunctionType:
        for each, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != _EMPTY:
                yield each, cell.cell_contents
        yield from ((name, each) for each in value.__defaults__ or ())
        yield from _globals_of(value.__code__, value.__globals__)
    elif kind is MethodType:
        yield from [(name, value.__func__), (name, value.__self__)]
    elif kind is partial:
        yield from [(name, value.func), *((name, each) for each in value.args), *value.keywords.items()]
    elif kind in (list, tuple):
        yield from ((name, each) for each in value)
    elif kind is dict:
        yield from ((f"{key} of {name}" if type(key) is str else name, each) for key, each in value.items())
    elif not issubclass(kind, (ModuleType, type, Tensor)):
        yield name, kind.forward if issubclass(kind, nn.Module) else kind.__call__
        yield from ((f"{attribute} of {name}", each) for attribute, each in vars(value).items())
