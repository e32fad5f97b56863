"""Checks what torch's optimizers step with: gradients that `Towers.average` has averaged."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from samestep.errors import UsageError
from samestep.watching.model.dropped_gradients import note_optimizer

__all__ = [
    "averaged_parameters",
    "ids_of_outside_gradients",
    "note_outside_gradients",
    "open_steps",
    "step_hooks",
    "stepped",
]

averaged_parameters: weakref.WeakKeyDictionary[object, frozenset[int]] = weakref.WeakKeyDictionary()
"""For each `Towers` of this process, the ids of the parameters whose gradients it averages.

Ids, because `torch.utils.swap_tensors` rejects tensors that have weak references.
"""

_outside_gradients: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Gradients that passes have left on tensors that no `Towers` averages, by the tensors' ids."""

open_steps: weakref.WeakKeyDictionary[object, Sequence[Tensor]] = weakref.WeakKeyDictionary()
"""The parameters of each step of this process that has begun its passes and has no average yet."""

stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers of this process that have taken a step."""


def note_outside_gradients(leaves: Iterable[Tensor]) -> None:
    """After a backward, note the gradients of leaves that no `Towers` averages."""
    for leaf in leaves:
        if leaf.grad is not None and not any(id(leaf) in ids for ids in averaged_parameters.values()):
            _outside_gradients[id(leaf)] = leaf.grad


def ids_of_outside_gradients() -> frozenset[int]:
    """Return the ids of the tensors whose gradients these are."""
    return frozenset(_outside_gradients)


def _refuse_wrong_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped.add(optimizer)
    note_optimizer(optimizer)
    if open_steps:
        _refuse_no_average(optimizer)
    if not _outside_gradients:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and _outside_gradients.get(id(parameter)) is parameter.grad:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() would update a parameter of shape "
                    f"{list(parameter.shape)} with the gradient of this worker's towers alone, because it is "
                    "not part of the model: pass it, as an nn.Parameter, or its module, as Towers(model, "
                    "..., also=...)"
                )


def _refuse_no_average(optimizer: Optimizer) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameters in list(open_steps.values()):
        known = set(map(id, parameters))
        waiting = [parameter for parameter in held if id(parameter) in known]
        if waiting and all(parameter.grad is None for parameter in waiting):
            raise UsageError(
                f"{type(optimizer).__name__}.step() has no gradients yet, because average() has not been "
                "called: call it after the loop over towers, then clip and step"
            )


register_optimizer_step_pre_hook(_refuse_wrong_gradients)


def step_hooks(optimizer: Optimizer) -> list[object]:
    """Return all hooks on an optimizer's step, global ones included, except samestep's own."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    registries = *own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    hooks = [hook for registry in registries for hook in registry.values()]
    return [hook for hook in hooks if hook is not _refuse_wrong_gradients]
