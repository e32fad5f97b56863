"""Parameter groups that a program adds to its optimizers during a run, as it unfreezes layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

__all__ = ["GroupNames", "add_groups", "names_of_groups", "remove_groups"]

GroupNames: TypeAlias = Mapping[str, Sequence[Sequence[tuple[str, str]]]]
"""By optimizer, for each of its groups: the parameters' modules and names."""


def names_of_groups(optimizers: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> GroupNames:
    """Return the groups of optimizers; those with parameters of other modules are left out."""
    names = {id(parameter): name for name, parameter in _parameters(modules).items()}
    found = {}
    for name, optimizer in optimizers.items():
        if isinstance(optimizer, Optimizer):
            groups = [group["params"] for group in optimizer.param_groups]
            if all(id(parameter) in names for group in groups for parameter in group):
                found[name] = [[names[id(parameter)] for parameter in group] for group in groups]
    return found


def add_groups(optimizers: Mapping[str, Any], modules: Mapping[str, nn.Module], names: GroupNames) -> None:
    """Add the groups that the optimizers of another worker have and these lack, with default options."""
    parameters = _parameters(modules)
    for name, groups in names.items():
        optimizer = optimizers.get(name)
        if isinstance(optimizer, Optimizer):
            for group in groups[len(optimizer.param_groups) :]:
                if all(each in parameters for each in group):
                    optimizer.add_param_group({"params": [parameters[each] for each in group]})


def remove_groups(optimizer: Optimizer, number: int) -> None:
    """Keep the first groups only, and forget the state of the others' parameters."""
    for group in optimizer.param_groups[number:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[number:]


def _parameters(modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], nn.Parameter]:
    return {
        (module, name): parameter
        for module, each in modules.items()
        for name, parameter in each.named_parameters()
    }
