"""Plain numbers that modules keep: counters that passes change, and what layers are set to.

No tensor has them, so nothing follows them from one tower's pass to another's.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

__all__ = ["OwnNumbers"]

_MOST_BYTES = 2**16
_MOST_NAMES = 4
_SETTINGS = (bool, int, float, str, tuple)


class OwnNumbers:
    """The numbers that the modules of a model, and those that run beside it, have as attributes."""

    def __init__(self, model: nn.Module) -> None:
        modules = [(_named(name, module), module) for name, module in model.named_modules()]
        self._modules = [module for _, module in modules]
        self._names = {id(module): name for name, module in modules}
        self._beside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._before: dict[tuple[int, str], Any] = {}
        self._tower = -1
        self._changed: dict[tuple[int, str], bool] = {}  # in this step; whether to the tower's index alone
        self._told: set[tuple[int, str]] = set()

    def start_step(self) -> None:
        """Forget what passes of the step before have changed."""
        self._changed.clear()

    def start_pass(self, tower: int) -> None:
        """Note what is there before a tower's pass."""
        self._tower = tower
        self._before = self._current()

    def note(self, module: nn.Module) -> None:
        """Note what a module beside the model has, where it runs for the first time."""
        if module not in self._beside:
            self._beside.add(module)
            self._before.update(((id(module), name), value) for name, value in _numbers(module))

    def check(self) -> None:
        """Warn, once, of numbers that two passes of a step have changed: each goes on where one before ended.

        Sizes, and what follows the steps, change in the first pass alone; a tower's index may be given.
        """
        found, before, self._before = [], self._before, {}
        for place, now in self._current().items() if before else ():
            if place in self._told or not _differ(before.get(place, now), now):
                continue
            is_index = now == self._tower and self._changed.get(place, True)
            if place in self._changed and not is_index:
                self._told.add(place)
                found.append(f"{place[1]} of {self._names.get(place[0]) or self._name_beside(place[0])}")
            self._changed[place] = is_index
        if found:
            warnings.warn(
                f"passes changed {', '.join(found[:_MOST_NAMES])}: what a tower's pass leaves there, the "
                "next one finds, so a loss that depends on it is another one on another number of workers; "
                "count steps after average(), set it in each pass before it is read, or keep it in a buffer "
                "with a policy",
                stacklevel=2,
            )

    def settings(self) -> Mapping[str, str]:
        """Return what torch's own layers are set to, by layer, without what passes change."""
        return {
            self._names[id(module)]: ", ".join(self._settings(module))
            for module in self._modules
            if type(module).__module__.startswith("torch.nn.")
        }

    def _settings(self, module: nn.Module) -> Iterator[str]:
        for name, value in vars(module).items():
            is_setting = isinstance(value, _SETTINGS) and name[0] != "_" and name != "training"
            if is_setting and (id(module), name) not in self._told:
                yield f"{name}={value!r}"

    def _current(self) -> dict[tuple[int, str], Any]:
        modules = [*self._modules, *self._beside]
        return {(id(module), name): value for module in modules for name, value in _numbers(module)}

    def _name_beside(self, number: int) -> str:
        return next(_named("", module) for module in self._beside if id(module) == number)


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                yield name, value.tobytes()
        elif isinstance(value, (int, float, complex, np.generic)) and name != "training":  # see `Modes`
            yield name, value


def _differ(old: Any, new: Any) -> bool:
    is_nan = old != old and new != new
    return bool(old != new) and not is_nan
