"""Plain numbers that modules keep: counters that passes change, and the settings of layers.

`FlowWatch` cannot follow them from pass to pass, because they are not in tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

from samestep.errors import warn

__all__ = ["OwnNumbers"]

_MOST_BYTES = 2**16
_MOST_NAMES = 4
_PLAIN = (bool, int, float, str, type(None))
_NO_NUMBERS = frozenset([dict, OrderedDict, set, str, type(None)])


_Place = tuple[weakref.ref[Any], str]
"""A module and the name of an attribute; no id, which may be reused once the module is gone."""


class OwnNumbers:
    """The numbers that are attributes of the model's modules, and of others that passes run.

    Without a model, those of the objects that are noted.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        modules = {} if model is None else dict(model.named_modules())
        for name, module in modules.items():
            self._names[module] = f"{name} ({type(module).__name__})" if name else type(module).__name__
        self._layers = [each for each in modules.values() if type(each).__module__.startswith("torch.nn.")]
        self._before: dict[_Place, Any] = {}
        self._tower = -1
        self._changed: dict[_Place, bool] = {}  # in this step; True if only ever to the tower's index
        self._reported: set[_Place] = set()

    @property
    def has_warned(self) -> bool:
        """Whether there has been a warning of numbers that passes change."""
        return bool(self._reported)

    def start_step(self) -> None:
        """Forget what the previous step's passes have changed."""
        self._changed.clear()

    def start_pass(self, tower: int) -> None:
        """Note the numbers before a tower's pass."""
        self._tower = tower
        self._before = self._current()

    def note(self, module: Any) -> None:
        """Note what a module beside the model has, where it runs for the first time; or another object."""
        if module not in self._names:
            self._names[module] = type(module).__name__
            self._before.update(_numbers(module))

    def check(self) -> None:
        """Warn, once for each, of numbers that two passes of a step have changed.

        Sizes and numbers that follow the step change only in the first pass; a tower's index is allowed.
        """
        found, before, self._before = [], self._before, {}
        for place, now in self._current().items() if before else ():
            if place in self._reported or not _differ(before.get(place, now), now):
                continue
            is_index = now == self._tower and self._changed.get(place, True)
            if place in self._changed and not is_index:
                self._reported.add(place)
                module, attribute = place
                found.append(f"{attribute} of {self._names[module()]}")
            self._changed[place] = is_index
        if found:
            warn(
                f"passes changed {', '.join(found[:_MOST_NAMES])}: a tower's pass starts from the value that "
                "the previous pass on its worker left, so a loss that uses it depends on the number of "
                "workers; count steps after average(), set the value in each pass before reading it, or keep "
                "it in a buffer with a policy"
            )

    def settings(self) -> Mapping[str, str]:
        """Return the settings of torch's own layers, by layer, except numbers that passes change."""
        return {self._names[layer]: ", ".join(self._settings(layer)) for layer in self._layers}

    def _settings(self, layer: nn.Module) -> Iterator[str]:
        for name, value in vars(layer).items():
            is_setting = value is not None and _is_plain(value) and name[0] != "_" and name != "training"
            if is_setting and (weakref.ref(layer), name) not in self._reported:
                yield f"{name}={value!r}"

    def _current(self) -> dict[_Place, Any]:
        return dict(chain.from_iterable(map(_numbers, list(self._names))))


def _numbers(module: Any) -> Iterator[tuple[_Place, Any]]:
    for name, value in vars(module).items():
        if type(value) in _NO_NUMBERS:  # most attributes; this is quicker than the checks below
            continue
        if isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                yield (weakref.ref(module), name), value.tobytes()
        elif isinstance(value, (int, float, complex, np.generic)) and name != "training":  # see `Modes`
            yield (weakref.ref(module), name), value


def _is_plain(value: Any) -> bool:
    """Say whether each process would write it alike; not so with functions, as in a `qconfig`."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _differ(old: Any, new: Any) -> bool:
    is_nan = old != old and new != new
    return bool(old != new) and not is_nan
