"""Plain numbers that modules keep: counters that passes change, and the settings of layers.

`FlowWatch` cannot follow them from pass to pass, because they are not in tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

from samestep.errors import warn
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import Value, attribute_of
from samestep.watching.program.reach import functions_of
from samestep.watching.program.source_code import SourceCode

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
        self._judged: set[_Place] = set()  # that several passes have changed
        self._reported: set[_Place] = set()  # those of them that a warning has named

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

    def check(self, pass_function: Callable[[Any], Any] | None = None) -> None:
        """Warn, once for each, of numbers that two passes of a step have changed.

        Sizes and numbers that follow the step change only in the first pass; a tower's index is allowed. So
        is what each pass sets anew, for a log: that which no code of the program reads before.
        `pass_function` is as for `Watch.start_step`.
        """
        found, before, self._before = list[_Place](), self._before, {}
        for place, now in self._current().items() if before else ():
            if place in self._judged or not _differ(before.get(place, now), now):
                continue
            is_index = now == self._tower and self._changed.get(place, True)
            if place in self._changed and not is_index:
                found.append(place)
            self._changed[place] = is_index
        if not found:
            return
        self._judged.update(found)
        carried = _carried_on(found, pass_function, list(self._names))
        self._reported.update(carried)
        if names := [f"{attribute} of {self._names[module()]}" for module, attribute in carried]:
            warn(
                f"passes changed {', '.join(names[:_MOST_NAMES])}: a tower's pass starts from the value that "
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


def _carried_on(
    places: Sequence[_Place], pass_function: Callable[[Any], Any] | None, known: Sequence[Any]
) -> Sequence[_Place]:
    """Return those that a pass may read before it sets them, as far as the program's code shows.

    Args:
        places: the numbers.
        pass_function: as for `Watch.start_step`.
        known: all objects that are watched, such as a module whose forward sets a number of another one.
    """
    source = SourceCode()
    flow = CodeFlow.of_running_loop(source, pass_function)
    modules = [module for module in dict.fromkeys(of() for of, _ in places) if isinstance(module, nn.Module)]
    others = {type(each): each for each in reversed(known) if isinstance(each, nn.Module)}
    # They may have run in a library's, such as `nn.Sequential`; the model comes first.
    for module in dict.fromkeys([*reversed(others.values()), *modules]):
        flow.run_function(attribute_of(type(module), "forward"), [Value.of(module)])
    visited = modules if pass_function is None else [of() for of, _ in places]
    return [
        (of, name)
        for of, name in places
        if of() not in visited or _is_named_in_library(of(), name, source) or not flow.sets_anew(of(), name)
    ]


def _is_named_in_library(module: Any, name: str, source: SourceCode) -> bool:
    """Say whether a method of a module uses an attribute, and its source is that of a library."""
    codes = (function.__code__ for function in functions_of(type(module)))
    return any(name in code.co_names and source.function(code) is None for code in codes)


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
