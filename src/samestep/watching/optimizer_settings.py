"""Finds what passes change about optimizers: a learning rate schedule that is advanced for each tower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import UsageError
from samestep.watching.reach import Named

__all__ = ["OptimizerSettings", "has_settings"]

_Place = tuple[int, int, str]
"""Of an optimizer or schedule among those that are held, of its parameter group, and of the setting."""


class OptimizerSettings:
    """The numbers in optimizers' parameter groups, and those of schedules, that a step's passes can reach."""

    def __init__(self) -> None:
        self.start_step(())

    def start_step(self, in_reach: Iterable[Named]) -> None:
        """Watch the optimizers and schedules among the objects that this step's passes can reach."""
        schedules = [value for _, value in in_reach if has_settings(value)]
        optimizers = [getattr(each, "optimizer", each) for each in schedules]
        self._held = list({id(each): each for each in (*optimizers, *schedules)}.values())
        self._before: dict[_Place, Any] = {}
        self._changed: set[_Place] = set()  # by an earlier pass of the step

    def start_pass(self) -> None:
        """Note the settings before a tower's pass."""
        self._before = self._current()

    def check(self, who: str) -> None:
        """Raise if `who` changed a setting that an earlier pass of the step also changed.

        What follows the step's number changes only in the first pass.

        Raises:
            UsageError: names the optimizer or schedule, and the setting.
        """
        now, before = self._current(), self._before
        changed = {place for place, value in now.items() if before.get(place, value) != value}
        self._before = now
        twice = sorted(changed & self._changed)
        self._changed |= changed
        if twice:
            number, _, name = twice[0]
            raise UsageError(
                f"{who} changed {name} of {type(self._held[number]).__name__}, which an earlier pass of the "
                "step also changed, so its value depends on how many towers share a worker: step schedules "
                "and set learning rates after average(), beside optimizer.step()"
            )

    def _current(self) -> dict[_Place, Any]:
        return {
            (number, group, name): value
            for number, each in enumerate(self._held)
            for group, name, value in _settings(each)
        }


def has_settings(value: object) -> bool:
    """Say whether this is an optimizer or a learning rate schedule, by type, so that proxies load nothing."""
    return issubclass(type(value), (Optimizer, LRScheduler))


def _settings(each: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield the plain numbers of an optimizer's parameter groups, by group and name, or of a schedule."""
    for group, values in enumerate(each.param_groups if isinstance(each, Optimizer) else [vars(each)]):
        for name, value in values.items():
            if name[0] == "_":
                continue
            if isinstance(value, Tensor) and value.numel() == 1:  # a capturable optimizer's learning rate
                yield group, name, value.item()
            elif isinstance(value, (int, float, tuple)):  # a tuple of betas
                yield group, name, value
