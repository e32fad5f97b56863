"""Finds a program's own random generators, which continue from tower to tower within a worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.errors import warn
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.reach import Named

__all__ = ["OwnGenerators", "is_generator", "state_of"]

_methods: tuple[Any, ...] = (random.random, np.random.rand)
_GLOBAL = {id(torch.default_generator), *(id(method.__self__) for method in _methods)}
_KINDS = (random.Random, np.random.Generator, np.random.RandomState)


def state_of(value: Any) -> object:
    """Return the state of a random generator, to be compared with `==`, and None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return _without_arrays(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _without_arrays(value.get_state(legacy=False))
    return None


def _without_arrays(state: Any) -> Any:
    """Return a state of NumPy's in which arrays, which `==` does not compare as a whole, are bytes."""
    if isinstance(state, dict):
        return {name: _without_arrays(each) for name, each in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def is_generator(value: Any) -> bool:
    """Say whether a value is a generator of Python or NumPy, by type, so that proxies load nothing."""
    return issubclass(type(value), _KINDS)


class OwnGenerators:
    """Generators that are attributes of a model's modules, and those of Python and NumPy in reach of passes.

    `FlowWatch` sees other torch generators when operators draw from them.

    Attributes:
        has_warned: whether there has been a warning.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{attribute} of {name or 'the model'}", value)
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if _is_own(value)
        ]
        self._reached: list[Named] = []
        self._seeded: list[object] = []  # those that each pass seeds before it draws
        self._before: list[object] = []
        self._drawn: list[Named] = []
        self.has_warned = False

    def start_step(self, in_reach: Iterable[Named]) -> None:
        """Watch the generators among the objects that this step's passes can reach."""
        held = {id(value) for _, value in self._held}
        self._reached = []
        for name, value in () if self.has_warned else in_reach:
            if _is_own(value) and id(value) not in held:
                held.add(id(value))
                self._reached.append((name, value))

    def note(self) -> None:
        """Note the generators' states before a pass."""
        self._before = self._states()

    def compare(self) -> None:
        """Note those that a pass has drawn from, for `check`."""
        triples = zip([*self._held, *self._reached], self._before, self._states(), strict=True)
        self._drawn = [named for named, old, new in triples if new != old and not self._is_seeded(named[1])]

    def check(
        self, who: str = "a pass", unit: str = "tower", code: Callable[[], CodeFlow] | None = None
    ) -> None:
        """Warn, once, of generators that `who` has drawn from, for one `unit` after the other.

        `code` returns the code that has run, if it is known: it may have seeded them before it drew.
        """
        drawn, self._drawn = self._drawn, []
        if drawn and code is not None:
            flow = code()
            self._seeded += [value for _, value in drawn if flow.seeds_first(value)]
            drawn = [each for each in drawn if not self._is_seeded(each[1])]
        if drawn:
            names = ", ".join(name for name, _ in drawn)
            self._held, self._reached, self._before, self.has_warned = [], [], [], True
            warn(
                f"{who} drew from {names}, a random generator of its own, which continues from "
                f"{unit} to {unit} on a worker, so its numbers depend on the number of workers: draw from "
                f"torch's, random's and np.random's global generators, which are seeded for each {unit}, or "
                f"seed your own generator for each {unit}"
            )

    def _is_seeded(self, value: object) -> bool:
        return any(value is each for each in self._seeded)

    def _states(self) -> list[object]:
        return [state_of(value) for _, value in (*self._held, *self._reached)]


def _is_own(value: object) -> bool:
    return id(value) not in _GLOBAL and state_of(value) is not None
