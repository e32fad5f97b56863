"""What passes use besides the model: nets with buffers of their own, and parameters that are not averaged."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from samestep.errors import BufferPolicyError, UsageError
from samestep.identity import checksum_of, is_compiled
from samestep.watching.modes import Modes
from samestep.watching.own_numbers import OwnNumbers
from samestep.watching.reach import Named

__all__ = [
    "OutsideNets",
    "averaged_parameters",
    "graph_of",
    "note_outside_gradients",
    "open_steps",
    "step_hooks",
    "stepped",
]

_keys = itertools.count(-1, -1)  # torch's own keys are not negative
_SMALL_BYTES = 2**16
_MOST_NAMES = 4

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


def graph_of(losses: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the losses' autograd graph; those of leaves have an attribute `variable`."""
    nodes: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes.extend(each for each, _ in node.next_functions)


def note_outside_gradients(leaves: Iterable[Tensor]) -> None:
    """After a backward, note the gradients of leaves that no `Towers` averages."""
    for leaf in leaves:
        if leaf.grad is not None and not any(id(leaf) in ids for ids in averaged_parameters.values()):
            _outside_gradients[id(leaf)] = leaf.grad


def _refuse_wrong_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped.add(optimizer)
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


class _Seen(NamedTuple):
    name: str
    tensor: Tensor
    version: int
    crc: int


class OutsideNets:
    """Finds nets outside the model that passes run, and checks that their buffers do not change.

    A global forward hook finds the nets, in some steps; from then on every step checks them.

    Args:
        model: its modules are not outside.
        modes: is notified of the model's layers that run.
        numbers: is notified of other modules that run.
    """

    def __init__(self, model: nn.Module, modes: Modes, numbers: OwnNumbers) -> None:
        self._modes, self._numbers = modes, numbers
        modules = list(model.modules())
        self._inside = weakref.WeakSet(modules)
        # A compiled module runs no hooks of its submodules, warns about this one, and would be compiled
        # again for the steps that have it.
        self._is_compiled = any(map(is_compiled, modules))
        self._seen: weakref.WeakKeyDictionary[nn.Module, list[_Seen]] = weakref.WeakKeyDictionary()
        self._num_passes = 0
        # Nets that have run in a single pass so far, in this step.
        self._new: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # Always the same key: torch.compile compiles again for each new one, and from a limit on runs
        # different code.
        self._key = next(_keys)

    def start_step(self) -> None:
        """Note the buffers of all known nets."""
        if self._seen:
            for module in list(self._seen):
                self._seen[module] = _buffers_of(module)
            self._new.clear()

    def note_compiled(self, in_reach: Iterable[Named]) -> None:
        """Install no hook from now on if anything that passes can reach is compiled."""
        self._is_compiled = self._is_compiled or any(is_compiled(value) for _, value in in_reach)

    def start_looking(self) -> None:
        """Note every module that runs, until `stop_looking`."""
        self._num_passes += 1
        if not self._is_compiled:
            _global_forward_pre_hooks[self._key] = self._note

    def stop_looking(self) -> None:
        """Remove the hook."""
        _global_forward_pre_hooks.pop(self._key, None)

    def _note(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # must not be traced into the graph
            return
        if module in self._inside:
            self._modes.note(module)
            return
        self._numbers.note(module)
        if module._buffers and module not in self._seen:
            self._seen[module] = _buffers_of(module)
            self._new[module] = self._num_passes
        elif self._new.get(module, self._num_passes) != self._num_passes:
            del self._new[module]

    def check(self, who: str) -> None:
        """Raise if `who` changed a buffer of a net outside the model.

        A net that has run in only one pass is exempt: the pass may have made it, such as a copy of the model
        for an inner loop. A net that persists is reported in the pass, or the step, that runs it again.

        Raises:
            BufferPolicyError: names the buffers and their module.
        """
        for module, before in self._seen.items() if self._seen else ():
            if module in self._new:
                continue
            changed = [
                seen.name
                for seen in before
                if (now := module._buffers.get(seen.name)) is not seen.tensor
                or _version(now) != seen.version
                or _crc(now) != seen.crc
            ]
            if changed:
                raise BufferPolicyError(
                    f"{who} changed {', '.join(changed[:_MOST_NAMES])} of a {type(module).__name__} that is "
                    "not part of the model, so workers would end with different values: call eval() on that "
                    "net for the pass, update it after average(), or pass it as Towers(model, ..., "
                    "also=net), which shares its buffers"
                )


def _buffers_of(module: nn.Module) -> list[_Seen]:
    return [
        _Seen(name, tensor, _version(tensor), _crc(tensor))
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _crc(tensor: Tensor) -> int:
    """Hash a small tensor in host memory, because batch norm's kernels write without a new version."""
    is_in_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided
    small = is_in_memory and tensor.nbytes <= _SMALL_BYTES
    return checksum_of(tensor.detach().contiguous()) if small else 0
