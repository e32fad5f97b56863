"""What a step requires of its optimizer and its scheduler, and the settings that workers compare."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from samestep.arguments import parameters_of
from samestep.errors import ConfigError

__all__ = ["check_can_step", "check_optimizer", "settings_of"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_optimizer(optimizer: torch.optim.Optimizer, averaged: Iterable[nn.Parameter]) -> None:
    """Raise if the optimizer has a parameter that requires grad but whose gradient is not averaged."""
    known = set(map(id, averaged))
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"optimizer: parameter {position} of group {number}, {list(parameter.shape)}, is not "
                    "part of the model, so its gradient is not averaged: pass it as Towers(model, ..., "
                    "also=...), or create the optimizer again if a layer was replaced"
                )


def check_can_step(name: str, value: object) -> None:
    """Raise if `step()` of an optimizer or a scheduler is missing or needs an argument, such as a closure."""
    step = getattr(value, "step", None)
    if step is None:
        raise ConfigError(f"{name} is a {type(value).__name__}: expected one with step()")
    of_class = getattr(type(value), "step", None)  # schedulers wrap an instance's step
    try:
        parameters = [*parameters_of(of_class or step).values()][of_class is not None :]
    except ValueError:  # Python knows no signature of it
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in _POSITIONAL]
    if needed:
        raise ConfigError(
            f"{name} is a {type(value).__name__}, whose step() needs {', '.join(needed)}, which a Step "
            "cannot pass: call it in your own loop, after the step"
        )


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's groups, by name, without tensors on a GPU, which take a sync."""
    return {
        f"{name} of parameter group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str, tuple, type(None)))
        or (isinstance(value, Tensor) and value.is_cpu)
    }
