"""The state of a run between two steps, in host memory: copied from the objects, and restored to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from samestep.checkpoint.fit import check_state, check_tensors
from samestep.checkpoint.objects import (
    ADDED,
    AVERAGES,
    WEIGHTS,
    TrainingObjects,
    kind_of,
    load_state,
    state_of,
)
from samestep.checkpoint.state_tree import check_values, from_outline, to_outline
from samestep.errors import ConfigError, DataError, Error, one_line, shown
from samestep.identity import Fingerprint, fingerprint
from samestep.sharding.sharded_optimizer import ShardedOptimizer
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["STATE", "Snapshot", "check_snapshot", "restore", "take_snapshot"]

STATE = "training"
"""Name of the files with all state besides the modules' tensors."""

_SECTIONS = ("own", "state", "kinds", "extra")
_NOT_ON_DISK = (torch.complex128, torch.complex32)  # safetensors has no such dtypes


@dataclass(frozen=True)
class Snapshot:
    """A copy of all state after a step.

    Attributes:
        step: steps taken.
        fingerprint: see `samestep.identity`.
        weights: the model's tensors, by name.
        averages: the averaged model's tensors, by the names in the model; None without an averaged model.
        outline: all other state as JSON values, without tensors; see `samestep.checkpoint.state_tree`.
        tensors: the tensors of that other state, by name.
    """

    step: int
    fingerprint: Fingerprint
    weights: Mapping[str, Tensor]
    averages: Mapping[str, Tensor] | None
    outline: Any
    tensors: Mapping[str, Tensor]

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return all other state: "own" objects, the user's "state", its type names, modules' "extra" state.

        Raises:
            ValueError: the outline has other sections.
        """
        nest = from_outline(self.outline, self.tensors)
        is_right = isinstance(nest, dict) and tuple(nest) == _SECTIONS
        if not is_right or not all(isinstance(section, dict) for section in nest.values()):
            raise ValueError(f"invalid entries: {shown(nest, 200)}")
        return nest  # type: ignore[no-any-return]


pytree.register_dataclass(Snapshot)  # so that workers can send its tensors


def take_snapshot(objects: TrainingObjects, step: int = 0) -> Snapshot:
    """Copy the state of all objects to host memory; call it between two steps.

    Args:
        objects: what to copy.
        step: steps taken; only used without `towers`.

    Raises:
        ConfigError: some of the state cannot be written to a checkpoint.
    """
    state = _state_now(objects, step)
    return replace(
        state,
        weights=_copies(state.weights, torch.contiguous_format),
        averages=None if state.averages is None else _copies(state.averages, torch.contiguous_format),
        tensors=_copies(state.tensors, torch.preserve_format),
    )


def check_snapshot(objects: TrainingObjects) -> None:
    """Raise now what `take_snapshot` would raise later, without copying anything.

    A sharded optimizer is left out, because its state is gathered from all workers.

    Raises:
        ConfigError: some of the state cannot be written to a checkpoint.
    """
    state = {n: value for n, value in objects.state.items() if not isinstance(value, ShardedOptimizer)}
    _state_now(replace(objects, state=state))


def _state_now(objects: TrainingObjects, step: int = 0) -> Snapshot:
    """Return a snapshot of the objects' own tensors, which the next step changes."""
    modules = {name: {} if m is None else state_of(m) for name, m in objects.modules.items()}
    tensors: dict[str, Tensor] = {}
    outline = {
        "own": {n: to_outline(state_of(value), n, tensors) for n, value in objects.own.items()},
        "state": {n: to_outline(state_of(value), n, tensors) for n, value in objects.others.items()},
        "kinds": {n: kind_of(value) for n, value in objects.others.items() if hasattr(value, "state_dict")},
        "extra": {
            name: to_outline(_others(entries), f"extra.{name}", tensors) for name, entries in modules.items()
        },
    }
    weights, averages = (_tensors(modules[name]) for name in (WEIGHTS, AVERAGES))
    for part, found in ((WEIGHTS, weights), (AVERAGES, averages), (STATE, tensors)):
        for name, tensor in found.items():
            _check_tensor(f"{part}: {name}", tensor)
    return Snapshot(
        step if objects.towers is None else objects.towers.step,
        fingerprint(objects.device),
        weights,
        None if objects.averaged_model is None else averages,
        outline,
        tensors,
    )


def restore(
    snapshot: Snapshot, objects: TrainingObjects, path: Path, job: Job | None = None
) -> dict[str, Any]:
    """Load a snapshot into the objects: all of it on all workers or, on an error, nothing on any worker.

    Args:
        snapshot: from `take_snapshot`, on this or another placement.
        objects: of the same model and experiment; those that are None are left out.
        path: the checkpoint that the snapshot was read from, for messages.
        job: the job, all workers of which must call this; None to load in this process alone.

    Returns:
        The user's state that is not in `objects`, by name.

    Raises:
        ConfigError: the snapshot is from a run with other settings, or an object cannot load state.
        DataError: it does not fit the objects.
        DisagreementError: it does not fit the objects of another worker.
    """
    with ExitStack() as undo:
        error: Error | None = None
        try:
            sections = snapshot.sections()
            weights = _weights_for(snapshot, sections, objects, path)
            check_state(sections["state"], sections["kinds"], objects.others, path)
            saved, targets = sections["state"] | sections["own"], objects.own | objects.others
            for name, target in targets.items():
                _load(name, target, saved[name], path, undo)
        except Error as found:
            error = found
        if job is not None:
            agree(job, {}, where=f"loading a checkpoint ({path})", error=error)
        elif error is not None:
            raise error
        undo.pop_all()  # nothing can fail from here on
    for module, entries in weights:
        load_state(module, entries)
    return {name: value for name, value in sections["state"].items() if name not in objects.others}


def _weights_for(
    snapshot: Snapshot, sections: Mapping[str, Any], objects: TrainingObjects, path: Path
) -> list[tuple[Any, dict[str, Any]]]:
    """Return each module with the entries to load, after checking that nothing is missing."""
    found: list[tuple[Any, dict[str, Any]]] = []
    tensors = {WEIGHTS: snapshot.weights, AVERAGES: snapshot.averages}
    for name, module in objects.modules.items():
        if module is None:
            continue
        saved, extra = tensors[name], sections["extra"].get(name)
        if saved is None:
            raise DataError(f"{path}: was saved without {name}")
        if not isinstance(extra, dict) or extra.keys() & saved.keys():
            raise DataError(f"{path}: invalid extra state of the {name.replace('_', ' ')}: {shown(extra)}")
        found.append((module, {**saved, **extra}))
        check_tensors(found[-1][1], state_of(module), f"{path / name}.safetensors", name.replace("_", " "))
    for name in objects.own:
        if name not in sections["own"]:
            missing = name
            if name == AVERAGES:  # the averages themselves are there
                missing = (
                    "the number of updates, as averaged_model was a plain module; pass averaged_model.module"
                )
            raise DataError(f"{path}: was saved without {missing}")
    unexpected = [name for name in sections["own"] if name.startswith(ADDED) and name not in objects.own]
    if unexpected and objects.towers is not None:
        raise DataError(f"{path}: holds {unexpected[0]}; make these Towers with the same also")
    return found


def _load(name: str, target: Any, state: Any, path: Path, undo: ExitStack) -> None:
    """Load one object, and add a callback to `undo` that restores its former state."""
    if isinstance(target, ShardedOptimizer):
        undo.callback(target._keep())
    else:
        former = state_of(target)
        # No copy for an optimizer, as loading replaces its tensors; other objects may write into theirs.
        undo.callback(load_state, target, former if isinstance(target, Optimizer) else copy.deepcopy(former))
    try:
        load_state(target, state)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:  # objects raise errors of any type for a state that does not fit
        why = one_line(f"{type(error).__name__}: {error}")
        raise DataError(f"{path}: its state of {name} does not fit ({why})") from error


def _check_tensor(name: str, tensor: Tensor) -> None:
    check_values(name, tensor)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype in _NOT_ON_DISK:
        raise ConfigError(
            f"{name} is {tensor.layout} {tensor.dtype}, which safetensors cannot hold; keep it dense, and in "
            "another dtype"
        )


def _copies(tensors: Mapping[str, Tensor], layout: torch.memory_format) -> dict[str, Tensor]:
    return {name: each.detach().to("cpu", copy=True, memory_format=layout) for name, each in tensors.items()}


def _tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}


def _others(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if not isinstance(entry, Tensor)}
