"""Sends a run's state between two steps from one worker to others, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import Snapshot, restore, take_snapshot
from samestep.identity import uncompiled
from samestep.workers.agreement import hand_over
from samestep.workers.job import Job

__all__ = [
    "Modes",
    "Trained",
    "check_state",
    "modes",
    "send_state",
    "set_modes",
    "set_trained",
    "take_state",
    "trained",
]

State: TypeAlias = tuple[Snapshot, Mapping[str, Mapping[str, Tensor]]]
"""A checkpoint's state, and the buffers that it leaves out: by the module's name, then by the buffer's."""

Trained: TypeAlias = Mapping[str, Mapping[str, bool]]
"""Which parameters require grad: by the module's name, then by the parameter's."""

Modes: TypeAlias = Sequence[bool]
"""Whether each layer is in training mode."""


def send_state(
    objects: TrainingObjects, job: Job, source: int, targets: Sequence[int], more: Any = None
) -> tuple[State, Any] | None:
    """Send the state of worker `source` to the workers `targets`; all workers must call this.

    Returns:
        On the targets, the state, for `take_state`, and the source's `more`; None on the others.
    """
    sent = ((take_snapshot(objects), _left_out(objects)), more) if job.rank == source else None
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
        ConfigError, DataError: it does not fit the objects, which are unchanged then.
    """
    snapshot, buffers = state
    restore(snapshot, objects, Path("the state of another worker"))
    modules = _modules(objects)
    with torch.no_grad():
        for name, tensors in buffers.items():
            for path, sent in tensors.items():
                _set_buffer(modules[name], path, sent.to(objects.device))


def trained(objects: TrainingObjects) -> Trained:
    """Return which parameters require grad; a checkpoint does not hold this, because the program sets it."""
    return {
        name: {key: parameter.requires_grad for key, parameter in module.named_parameters()}
        for name, module in _modules(objects).items()
    }


def set_trained(objects: TrainingObjects, flags: Trained) -> None:
    """Set `requires_grad` as on another worker."""
    for name, module in _modules(objects).items():
        for key, parameter in module.named_parameters():
            if key in flags.get(name, {}):
                parameter.requires_grad_(flags[name][key])


def modes(objects: TrainingObjects) -> Modes:
    """Return the layers' modes; a checkpoint does not restore these, because the program sets them."""
    return [layer.training for layer in _layers(objects)]


def set_modes(objects: TrainingObjects, modes: Modes) -> None:
    """Set the layers' modes to what `modes` returned, here or on another worker."""
    for layer, is_training in zip(_layers(objects), modes, strict=False):
        layer.training = is_training


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


def _layers(objects: TrainingObjects) -> Iterator[nn.Module]:
    return (layer for module in _modules(objects).values() for layer in module.modules())


def _modules(objects: TrainingObjects) -> dict[str, nn.Module]:
    """Return the modules: the model, under the name "", averages, what `also` adds, and others."""
    named = {**objects.own, **objects.others, "averages": objects.averaged_model}
    others = {name: each for name, each in named.items() if isinstance(each, nn.Module)}
    return {name: uncompiled(module) for name, module in {"": objects.model, **others}.items()}
