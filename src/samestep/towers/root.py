"""The module that a step trains: the user's model, and what `Towers(..., also=...)` adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError

__all__ = ["Also", "added_to", "check_module", "check_wrappers", "modules_in_list", "together"]

Also = nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter] | Mapping[str, nn.Module | nn.Parameter]

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


def check_module(model: object) -> None:
    """Raise unless `model` is a module; a list of modules is not."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}: expected an nn.Module; put several into an nn.ModuleList"
        )


def modules_in_list(model: nn.Module) -> str:
    """Return, as the end of an error, which list or dict holds modules that are no part of the model."""
    for name, module in model.named_modules():
        for attribute, held in vars(module).items():
            is_dict = isinstance(held, dict)
            parts = list(held.values()) if is_dict else held
            if attribute != "_modules" and isinstance(parts, list | tuple) and _has_module(parts):
                path = f"{name}.{attribute}" if name else attribute
                kind = "ModuleDict" if is_dict else "ModuleList"
                return f"; {path} is a {type(held).__name__} of modules: make it an nn.{kind}"
    return ""


def _has_module(parts: Iterable[Any]) -> bool:
    return any(isinstance(each, nn.Module) for each in parts)


def together(model: nn.Module, also: Also | None) -> nn.Module:
    """Return a module that holds the model and `also`; the model's tensors keep their names."""
    check_module(model)
    if also is None:
        return model
    if hasattr(model, "also"):
        raise ConfigError(
            "the model has an attribute also, the name of what also=... adds: rename it, or pass both in one "
            "nn.ModuleDict as the model"
        )
    root = nn.Module()
    root._modules[""] = model  # an empty name, so that parameter names stay the same
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


def added_to(model: nn.Module, root: nn.Module) -> nn.Module | None:
    """Return a module that holds, as its attribute `also`, what `together` has added; None for nothing."""
    if root is model:
        return None
    added = nn.Module()
    added.also = root.also
    return added


def _named(also: Any) -> list[tuple[str, Any]]:
    if not isinstance(also, Iterable) or isinstance(also, Tensor):
        raise ConfigError(
            f"also is a {type(also).__name__}: expected a module, an nn.Parameter, or several of them"
        )
    return (
        list(also.items()) if isinstance(also, Mapping) else [(str(n), each) for n, each in enumerate(also)]
    )


def check_wrappers(model: nn.Module) -> None:
    """Raise for modules that average or shard gradients themselves, or cannot be inspected."""
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS and type(module).__module__.startswith("torch."):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}, which averages gradients itself: pass "
                "the model that it wraps, model.module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__} of torch.jit, which samestep cannot "
                "inspect: pass the module that it was made from, or use torch.compile"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ConfigError(
                f"parameter {name} is a DTensor, sharded or replicated by fully_shard or the like: pass the "
                "plain model"
            )
