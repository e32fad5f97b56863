"""The module that a step trains: the user's model, and what is beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError

__all__ = ["Also", "check_optimizer", "check_wrappers", "settings_of", "together"]

Also = nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter] | Mapping[str, nn.Module | nn.Parameter]

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def together(model: nn.Module, also: Also | None) -> nn.Module:
    """Return a module of the model, whose tensors keep their names, and of what is beside it."""
    if also is None:
        return model
    root = nn.Module()
    root._modules[""] = model  # an empty name adds nothing to the names below it
    if isinstance(also, nn.Module | nn.Parameter):
        root.also = also
        return root
    root.also = nn.Module()
    for name, each in _named(also):
        if not isinstance(each, nn.Module | nn.Parameter):
            raise ConfigError(
                f"also holds a {type(each).__name__}: expected a module, an nn.Parameter, or several of them"
            )
        setattr(root.also, name, each)
    return root


def _named(also: Any) -> list[tuple[str, Any]]:
    if not isinstance(also, Iterable):
        raise ConfigError(
            f"also is a {type(also).__name__}: expected a module, an nn.Parameter, or several of them"
        )
    return (
        list(also.items()) if isinstance(also, Mapping) else [(str(n), each) for n, each in enumerate(also)]
    )


def check_wrappers(model: nn.Module) -> None:
    """Refuse what averages or shards gradients itself."""
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, which averages gradients itself: pass "
                "the model that it wraps, model.module"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ConfigError(
                f"parameter {name} is a DTensor, sharded or replicated by fully_shard or the like: pass the "
                "plain model"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, averaged: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer of parameters that require grad and that nobody averages."""
    known = set(map(id, averaged))
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"optimizer: parameter {position} of group {number}, {list(parameter.shape)}, is not "
                    "part of the model, so nobody averages its gradient: pass it as Towers(model, ..., "
                    "also=...), or create the optimizer again if a layer was replaced"
                )


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer's groups, by name; tensors on a GPU would have to be waited for."""
    return {
        f"{name} of parameter group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str, tuple, type(None)))
        or (isinstance(value, Tensor) and value.is_cpu)
    }
