"""What calls of torch, samestep and other packages do with weights, and which arguments results depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType

from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, vector_to_parameters
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.watching.program.code_values import (
    Method,
    Value,
    attribute_of,
    is_object_of,
    is_of_samestep,
    kind_of,
)
from samestep.watching.program.parameters import by_name, positional_names

__all__ = ["changes_layers", "is_setting", "name_of_change", "settings_of"]

_ARGUMENTS = ("batch", "batch_size", "clip_norm", "num_towers", "seed", "steps")
"""Parameters of samestep's classes on which the result depends."""

_CLIPPING = (clip_grad_norm_, clip_grad_value_)

_CHANGING_LAYERS = ("torch.nn.init", "torch.nn.utils.prune")

_KEEPING = {"copy", "copy2", "copyfile", "move", "save", "save_file", "save_model"}
"""Functions that write, copy or rename weights."""

_KEEPERS = {"torch", "safetensors", "shutil", "samestep"}
"""The packages that these are in."""

_CHANGES = {
    *("load_state_dict", "save_pretrained", "state_dict", "step"),
    *("reset_parameters", "reset_running_stats"),
}
"""Methods of modules, optimizers and schedules that keep them as they are, or change them."""


def name_of_change(called: Value, arguments: Sequence[Value]) -> str:
    """Return the name of a function that keeps weights, or changes what is trained; "" for others."""
    if is_object_of("Towers", called) or is_object_of("Step", called):
        return kind_of(called).__name__
    match called.object:
        case Method(function=function, of=holder):
            name, kind = function.__name__, kind_of(called)
            is_change = name in _CHANGES and issubclass(kind, (nn.Module, Optimizer, LRScheduler))
            is_change |= name == "stop" and is_object_of("Trainer", holder)
            return f"{kind.__name__}.{name}" if is_change else ""
        case type() as kind if issubclass(kind, (Optimizer, LRScheduler)):
            return f"{kind.__name__}(...)"
        case FunctionType(__name__=name, __module__=module):
            package = str(module).partition(".")[0]
            copies = name == "deepcopy" and any(issubclass(kind_of(each), nn.Module) for each in arguments)
            return f"{package}.{name}" if copies or (name in _KEEPING and package in _KEEPERS) else ""
    return ""


def changes_layers(function: object) -> bool:
    """Say whether this is one of torch's functions that prune layers, or set their weights."""
    if not isinstance(function, FunctionType):
        return False
    return function.__module__ in _CHANGING_LAYERS or function is vector_to_parameters


def _is_layer(kind: type) -> bool:
    """Say whether this is one of torch's own layers."""
    return issubclass(kind, nn.Module) and kind.__module__.startswith("torch.")


def is_setting(kind: type, name: str) -> bool:
    """Say whether one of torch's own layers is made with a setting of this name, or this is a schedule's."""
    is_of_layer = _is_layer(kind) and name in positional_names(attribute_of(kind, "__init__"))
    return is_of_layer or issubclass(kind, LRScheduler)


def settings_of(called: Value, arguments: Sequence[Value], named: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return the arguments on which the result depends, by name, of what torch and samestep define."""
    if any(called.object is each for each in _CLIPPING) or changes_layers(called.object):
        return by_name(positional_names(called.object), arguments, named)
    kind, is_new = kind_of(called), isinstance(called.object, type)
    method = called.object.function if isinstance(called.object, Method) else None
    is_step = method is not None and method.__name__ == "step"
    is_of_torch = (is_new and (_is_layer(kind) or issubclass(kind, (Optimizer, LRScheduler)))) or (
        is_step and issubclass(kind, (LBFGS, LRScheduler))
    )
    if not (is_of_torch or is_of_samestep(kind)):
        return {}
    function = method or attribute_of(kind, "__init__" if is_new else "__call__")
    names = positional_names(function)[1:]
    given = by_name(names, arguments, named)
    return given if is_of_torch else {name: value for name, value in given.items() if name in _ARGUMENTS}
