"""Checks that a checkpoint's state fits the objects that load it, before any of them changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Adafactor, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.objects import class_of, kind_of, state_of
from samestep.errors import ConfigError, DataError, one_line, shown

__all__ = ["check_state", "check_tensors"]

_OWN_SHAPES = (Adafactor, LBFGS)  # the shapes of their state differ from the parameters'


def check_tensors(saved: Mapping[str, Any], current: Mapping[str, Any], file: str, name: str) -> None:
    """Compare the entries of a module's state: their names, shapes and dtypes.

    Args:
        saved: the checkpoint's entries, by name.
        current: the module's entries, by name.
        file: the file with `saved`, for messages.
        name: the module's name, for messages.

    Raises:
        DataError: they differ.
    """
    problem = _difference(saved, current, name)
    if problem:
        raise DataError(f"{file}: does not fit the {name}: {problem}; use a checkpoint of the same model")


def check_state(
    saved: Mapping[str, Any], kinds: Mapping[str, Any], targets: Mapping[str, Any], path: Path
) -> None:
    """Compare saved states with the objects that will load them; unknown types are checked by name only.

    Args:
        saved: the states, by name.
        kinds: the type names of the objects that were saved, by name.
        targets: the objects to load into, by name.
        path: the checkpoint, for messages.

    Raises:
        ConfigError: an object cannot load state.
        DataError: a state is missing, or does not fit.
    """
    for name, target in targets.items():
        if not hasattr(target, "load_state_dict"):
            raise ConfigError(
                f"{name} is a {type(target).__name__}, which has no load_state_dict: leave it out, and "
                "read it from the state of the Manifest that load returns"
            )
        if name not in saved:
            raise DataError(
                f"{path}: was saved without {name}; it has {one_line(', '.join(saved)) or 'nothing else'}"
            )
        if kinds.get(name) != kind_of(target):
            raise DataError(f"{path}: {name} is from a {shown(kinds.get(name))}, not a {kind_of(target)}")
        problem = _problem(saved[name], target)
        if problem:
            raise DataError(f"{path}: its state of {name} does not fit: {problem}")


def _problem(saved: Any, target: Any) -> str | None:
    if isinstance(target, Optimizer) and type(target).state_dict is Optimizer.state_dict:
        return _problem_of_optimizer(saved, target)
    if isinstance(target, (LRScheduler, GradScaler)):
        return _unlike(saved, target.state_dict())
    if isinstance(target, nn.Module):
        if not isinstance(saved, dict):
            return f"it is {_describe(saved)}, expected a dict"
        return _difference(saved, state_of(target), "module")
    return None


def _difference(saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> str | None:
    """Describe the first entry of a module's state that differs from the saved one."""
    for entry in [*current, *saved]:
        in_file, in_module = (_describe(entries.get(entry)) for entries in (saved, current))
        if in_file != in_module:
            return f"{shown(entry, 200)} is {in_file} in the file, {in_module} in the {name}"
    return None


def _problem_of_optimizer(saved: Any, optimizer: Optimizer) -> str | None:
    match saved:
        case {"state": dict(states), "param_groups": list(groups)}:
            pass
        case _:
            return "it is not an optimizer's state and param_groups"
    current = [{**group, "params": [*range(len(group["params"]))]} for group in optimizer.param_groups]
    if len(groups) != len(current):
        return (
            f"it has {len(groups)} parameter groups, this optimizer has {len(current)}: before loading, add "
            "those that the run has added, with add_param_group()"
        )
    problem = _unlike(groups, current)
    if problem:
        return problem
    numbers = [number for group in groups for number in group.get("params", ())]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (
        len(numbers) != len(parameters)
        or len(set(numbers)) != len(numbers)
        or not states.keys() <= set(numbers)
    ):
        return f"it has parameters {shown(numbers)}, the optimizer has {len(parameters)}"
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = states.get(number, {})
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
            return f"it has no state for parameter {number}"
        for name, value in entries.items():
            if not _has_shape_for(value, parameter, optimizer):
                has, expected = _describe(value), _describe(parameter)
                return f"{shown(name)} of parameter {number} is {has}, the parameter is {expected}"
    return None


def _has_shape_for(value: Any, parameter: Tensor, optimizer: Optimizer) -> bool:
    found = class_of(optimizer)
    is_known = found.__module__.startswith("torch.optim.") and not issubclass(found, _OWN_SHAPES)
    return not is_known or not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape


def _unlike(saved: Any, current: Any, name: str = "it") -> str | None:
    """Describe where two nests differ in type; dict entries that only one of them has are ignored."""
    if current is None:  # not set yet: any type may be saved
        return None
    if isinstance(current, dict):
        if not isinstance(saved, dict):
            return f"{name} is {_describe(saved)}, expected a dict"
        names = [key for key in current if key in saved]
        return next((found for key in names if (found := _unlike(saved[key], current[key], str(key)))), None)
    if isinstance(current, Sequence) and not isinstance(current, str):
        if not isinstance(saved, Sequence) or isinstance(saved, str) or len(saved) != len(current):
            return f"{name} is {shown(saved)}, expected {len(current)} values"
        pairs = zip(saved, current, strict=True)
        return next((found for one, other in pairs if (found := _unlike(one, other, name))), None)
    if _kind(saved) != _kind(current):
        return f"{name} is {shown(saved)}, expected a value like {shown(current)}"
    return None


def _kind(value: Any) -> str:
    """Name a group of interchangeable types: an option that is off is None or False."""
    if value is None or isinstance(value, bool):
        return "option"
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return "number"
    return type(value).__name__


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "nothing" if value is None else type(value).__name__
