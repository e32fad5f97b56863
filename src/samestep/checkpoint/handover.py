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
from samestep.checkpoint.switches import all_modules
from samestep.workers.agreement import hand_over
from samestep.workers.job import Job

__all__ = ["send_state", "take_state"]

State: TypeAlias = tuple[Snapshot, Mapping[str, Mapping[str, Tensor]], GroupNames]
"""A checkpoint's state, and what it leaves out: buffers, by module and name, and the optimizers' groups."""


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


def take_state(state: State, objects: TrainingObjects) -> None:
    """Load the state of another worker.

    Raises:
        ConfigError, DataError: it does not fit the objects.
    """
    snapshot, buffers, groups = state
    modules = all_modules(objects)
    add_groups(objects.others, modules, groups)
    restore(snapshot, objects, Path("the state of another worker"))
    with torch.no_grad():
        for name, tensors in buffers.items():
            for path, sent in tensors.items():
                _set_buffer(modules[name], path, sent.to(objects.device))


def _state(objects: TrainingObjects) -> State:
    groups = names_of_groups(objects.others, all_modules(objects))
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
        for name, module in all_modules(objects).items()
    }


def _set_buffer(module: nn.Module, path: str, sent: Tensor) -> None:
    parent, _, attribute = path.rpartition(".")
    layer = module.get_submodule(parent)
    own = layer._buffers.get(attribute)
    if own is not None and own.is_contiguous() and (own.shape, own.dtype) == (sent.shape, sent.dtype):
        own.copy_(sent)
    else:
        layer._buffers[attribute] = sent
