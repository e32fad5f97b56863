"""Finds what passes change about optimizers: a learning rate schedule that is advanced for each tower."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, NoneType
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import UsageError
from samestep.watching.model.optimizer_steps import averaged_parameters
from samestep.watching.program.reach import Named

__all__ = ["OptimizerSettings", "has_settings"]

_PLAIN = (int, float, np.generic, str, NoneType, list, tuple, dict, FunctionType)

_Place = tuple[int, int, str]
"""Of an optimizer or schedule among those that are held, of its parameter group, and of the setting."""


class OptimizerSettings:
    """The settings of optimizers of averaged parameters, and of their schedules, that passes can reach."""

    def __init__(self) -> None:
        self.start_step(())

    def start_step(self, in_reach: Iterable[Named]) -> None:
        """Watch the optimizers and schedules among the objects that this step's passes can reach."""
        self._held = sorted(_with_averaged(in_reach), key=_is_schedule)
        self._before: dict[_Place, str] | None = None  # None in the worker's first pass

    def check(self, who: str) -> None:
        """Raise if `who` changed a setting, except in the worker's first pass of the step.

        What follows the step's number changes only in that pass.

        Raises:
            UsageError: names the optimizer or schedule, and the setting.
        """
        before, self._before = self._before, self._current()
        if before is None:
            return
        changed = [place for place, value in self._before.items() if before.get(place, value) != value]
        if changed:
            number, _, name = min(changed)
            raise UsageError(
                f"{who} changed {name} of {type(self._held[number]).__name__} after the worker's first pass, "
                "so its value depends on how many towers share a worker: step schedules and set learning "
                "rates after average(), beside optimizer.step()"
            )

    def _current(self) -> dict[_Place, str]:
        return {
            (number, group, name): value
            for number, each in enumerate(self._held)
            for group, name, value in _settings(each)
        }


def has_settings(value: object) -> bool:
    """Say whether this is an optimizer or a learning rate schedule, by type, so that proxies load nothing."""
    return issubclass(type(value), (Optimizer, LRScheduler)) or _is_own_schedule(value)


def _is_own_schedule(value: object) -> bool:
    """Say whether an object has a method `step`, and optimizers, but otherwise only numbers and the like.

    A trainer, which may count passes for its log, has a model or data, too.
    """
    kind = type(value)
    is_plain = kind.__getattribute__ is object.__getattribute__ and kind.__dictoffset__ != 0
    if not is_plain or not any("step" in vars(each) for each in kind.__mro__):
        return False
    kinds = [type(each) for each in vars(value).values()]
    held = [each for each in kinds if not issubclass(each, _PLAIN)]
    return bool(held) and all(issubclass(each, Optimizer) for each in held)


def _is_schedule(value: object) -> bool:
    return not isinstance(value, Optimizer)


def _with_averaged(in_reach: Iterable[Named]) -> list[Any]:
    """Return the optimizers of averaged parameters, none of inner loops, and these optimizers' schedules."""
    averaged = frozenset[int]().union(*averaged_parameters.values())
    found: dict[int, Any] = {}
    values = deque(value for _, value in in_reach)
    while values:
        value = values.popleft()
        if not has_settings(value) or id(value) in found:
            continue
        # A schedule has an optimizer, and an optimizer may wrap another one.
        optimizers = [each for each in (value, *vars(value).values()) if issubclass(type(each), Optimizer)]
        groups = [group for each in optimizers for group in each.param_groups]
        if not averaged.isdisjoint(id(each) for group in groups for each in group["params"]):
            found[id(value)] = value
            values.extend(optimizers)
        values.extend(getattr(value, "_schedulers", ()))  # of a schedule that is made of others
    return list(found.values())


def _settings(each: Any) -> Iterator[tuple[int, str, str]]:
    """Yield the options of an optimizer's parameter groups, by group and name, or a schedule's numbers."""
    if not isinstance(each, Optimizer):
        for name, value in vars(each).items():
            is_internal = name[0] == "_" and isinstance(each, LRScheduler)
            if not is_internal and isinstance(value, (int, float, np.generic)):
                yield 0, name, repr(value)
        return
    for group, options in enumerate(each.param_groups):
        for name in each.defaults:
            if name in options:
                yield group, str(name), _written(options[name])


def _written(option: Any) -> str:
    """Write an option, such as a learning rate in a tensor, or a tuple of betas; NaN is equal to NaN so."""
    if isinstance(option, Tensor):
        return repr(option.tolist()) if option.numel() == 1 else ""
    if isinstance(option, (list, tuple)):
        return ", ".join(map(_written, option))
    return repr(option) if isinstance(option, (int, float, np.generic)) else ""
