"""Sends a run's state between two steps from one worker to others, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from samestep.checkpoint.added_groups import GroupNames, add_groups, names_of_groups
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import Snapshot, restore, take_snapshot
from samestep.identity import uncompiled
from samestep.workers.agreement import hand_over
from samestep.workers.job import Job

__all__ = ["NamedSwitches", "Switches", "check_state", "send_state", "set_switches", "take_state"]

State: TypeAlias = tuple[Snapshot, Mapping[str, Mapping[str, Tensor]], GroupNames]
"""A checkpoint's state, and what it leaves out: buffers, by module and name, and the optimizers' groups."""

NamedSwitches: TypeAlias = Mapping[tuple[str, str], tuple[bool, Mapping[str, bool]]]
"""By module and layer: whether the layer is in training mode, and which of its parameters require grad."""


class Switches:
    """Which layers are in training mode, and which parameters require grad, to be restored.

    A checkpoint does not restore these, because the program sets them. They are kept by layer, as a program
    may insert layers meanwhile.
    """

    def __init__(self, objects: TrainingObjects) -> None:
        layers = [layer for module in _modules(objects).values() for layer in module.modules()]
        self._held = [(layer, layer.training, _flags(layer)) for layer in layers]

    def restore(self) -> None:
        """Set them as they were."""
        for layer, is_training, flags in self._held:
            _switch(layer, is_training, flags)

    def by_name(self, objects: TrainingObjects) -> NamedSwitches:
        """Return them for another worker."""
        held = {id(layer): (is_training, flags) for layer, is_training, flags in self._held}
        names = [
            (name, path, id(layer))
            for name, module in _modules(objects).items()
            for path, layer in module.named_modules()
        ]
        return {(name, path): held[key] for name, path, key in names if key in held}


def set_switches(objects: TrainingObjects, switches: NamedSwitches) -> None:
    """Set modes, and which parameters require grad, as on another worker."""
    for name, module in _modules(objects).items():
        for path, layer in module.named_modules():
            if (name, path) in switches:
                _switch(layer, *switches[name, path])


def _flags(layer: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in layer._parameters.items() if p is not None}


def _switch(layer: nn.Module, is_training: bool, flags: Mapping[str, bool]) -> None:
    layer.training = is_training
    for name, parameter in layer._parameters.items():
        if parameter is not None and parameter.requires_grad != flags.get(name, parameter.requires_grad):
            parameter.requires_grad_(flags[name])


def send_state(
    objects: TrainingObjects, job: Job, source: int, targets: Sequence[int], more: Any = None
) -> tuple[State, Any] | None:
    """Send the state of worker `source` to the workers `targets`; all workers must call this.

    Returns:
        On the targets, the state, for `take_state`, and the source's `more`; None on the others.
    """
    sent = (_state(objects), more) if job.rank == source else None
    sent = hand_over(sent, job, source, targets, f"the state of worker {source}")
    return sent if job.rank in targets else None


def check_state(objects: TrainingObjects) -> None:
    """Raise now what `send_state` would raise later, when a worker joins or falls behind.

    Raises:
        ConfigError: some of the state cannot be sent.
    """
    take_snapshot(objects)


def take_state(state: State, objects: TrainingObjects) -> None:
    """Load the state of another worker.

    Raises:
        ConfigError, DataError: it does not fit the objects.
    """
    snapshot, buffers, groups = state
    modules = _modules(objects)
    add_groups(objects.others, modules, groups)
    restore(snapshot, objects, Path("the state of another worker"))
    with torch.no_grad():
        for name, tensors in buffers.items():
            for path, sent in tensors.items():
                _set_buffer(modules[name], path, sent.to(objects.device))


def _state(objects: TrainingObjects) -> State:
    groups = names_of_groups(objects.others, _modules(objects))
    return take_snapshot(objects), _left_out(objects), groups


def _left_out(objects: TrainingObjects) -> dict[str, dict[str, Tensor]]:
    """Return copies of the buffers that are not persistent, by module and name."""
    return {
        name: {
            f"{path}.{attribute}".removeprefix("."): buffer.detach().to("cpu", copy=True)
            for path, layer in module.named_modules()
            for attribute, buffer in layer._buffers.items()
            if buffer is not None and attribute in layer._non_persistent_buffers_set
        }
        for name, module in _modules(objects).items()
    }


def _set_buffer(module: nn.Module, path: str, sent: Tensor) -> None:
    parent, _, attribute = path.rpartition(".")
    layer = module.get_submodule(parent)
    own = layer._buffers.get(attribute)
    if own is not None and own.is_contiguous() and (own.shape, own.dtype) == (sent.shape, sent.dtype):
        own.copy_(sent)
    else:
        layer._buffers[attribute] = sent


def _modules(objects: TrainingObjects) -> dict[str, nn.Module]:
    """Return the modules: the model, under the name "", averages, what `also` adds, and others."""
    named = {**objects.own, **objects.others, "averages": objects.averaged_model}
    others = {name: each for name, each in named.items() if isinstance(each, nn.Module)}
    return {name: uncompiled(module) for name, module in {"": objects.model, **others}.items()}
