"""The state of a run between two steps, in host memory: on its way to the disk, or back from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from samestep.checkpoint.fit import check_experiment, check_state, check_tensors
from samestep.checkpoint.state_tree import from_outline, to_outline
from samestep.data.loader import TowerLoader
from samestep.errors import ConfigError, DataError, one_line, shown
from samestep.identity import Fingerprint, fingerprint
from samestep.towers.towers import Towers

__all__ = ["AVERAGE", "STATE", "WEIGHTS", "Parts", "Snapshot", "check_fits", "restore", "take_snapshot"]

WEIGHTS, AVERAGE, STATE = "model", "average", "training"
"""Which part of a snapshot is meant, in file names and messages."""

_NOT_ON_DISK = (torch.complex128, torch.complex32)  # safetensors has no such dtypes


@dataclass(frozen=True)
class Parts:
    """The objects whose state a snapshot is of.

    Attributes:
        model: the model in training.
        average: a second module, with moving averages of the weights.
        towers: give T, the seed and the step.
        loader: gives the position, and what must be the same for it to mean the same.
        state: objects with a `state_dict`, or plain values, by name; None counts as not there.
    """

    model: nn.Module
    average: nn.Module | None = None
    towers: Towers | None = None
    loader: TowerLoader | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stateful(self) -> dict[str, Any]:
        """Those of `state` that have a `state_dict`."""
        return {name: value for name, value in self.state.items() if hasattr(value, "state_dict")}

    @property
    def experiment(self) -> dict[str, int]:
        """What must be the same where training goes on, as far as the parts tell."""
        facts: dict[str, int] = {}
        if self.towers is not None:
            facts |= {"towers": self.towers.placement.num_towers, "seed": self.towers.seed}
        if self.loader is not None:
            loader = self.loader
            facts |= {"batch_size": loader.batch_size, "data_seed": loader.seed}
            facts |= {
                "examples": len(loader.dataset),
                "shuffle": loader.shuffle,
                "drop_last": loader.drop_last,
            }
        return facts


@dataclass(frozen=True)
class Snapshot:
    """A copy of all state after a step.

    Attributes:
        step: steps taken.
        position: of the loader; None without one.
        experiment: see `Parts.experiment`.
        fingerprint: see `samestep.identity`.
        weights: of the model, by name.
        average: moving averages of the weights, by name, where they are kept.
        outline: all other state without its tensors, fit for JSON; see `samestep.checkpoint.state_tree`.
        tensors: of that state, by name.
    """

    step: int
    position: int | None
    experiment: Mapping[str, int]
    fingerprint: Fingerprint
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None
    outline: Any
    tensors: Mapping[str, Tensor]

    def state(self) -> dict[str, dict[str, Any]]:
        """Return what the outline holds: "kinds" of objects, their "state", "extra" state of the modules.

        Raises:
            ValueError: it holds something else.
        """
        nest = from_outline(self.outline, self.tensors)
        names = ("kinds", "state", "extra")
        if (
            not isinstance(nest, dict)
            or tuple(nest) != names
            or not all(isinstance(nest[n], dict) for n in names)
        ):
            raise ValueError(f"its entries cannot be {shown(nest, 200)}")
        return nest


pytree.register_dataclass(Snapshot)  # so that workers can send each other its tensors


def take_snapshot(step: int, parts: Parts) -> Snapshot:
    """Copy the state of all parts to host memory; call it between steps.

    Raises:
        ConfigError: some of it cannot be written to a checkpoint.
    """
    modules = {WEIGHTS: parts.model, AVERAGE: parts.average}
    dicts = {name: {} if module is None else module.state_dict() for name, module in modules.items()}
    tensors: dict[str, Tensor] = {}
    values = {name: value for name, value in parts.state.items() if value is not None}
    outline = {
        "kinds": {name: type(value).__qualname__ for name, value in parts.stateful.items()},
        "state": {
            name: to_outline(value.state_dict() if name in parts.stateful else value, name, tensors)
            for name, value in values.items()
        },
        "extra": {
            name: to_outline(_others(entries), f"extra.{name}", tensors) for name, entries in dicts.items()
        },
    }
    device = parts.towers.job.device if parts.towers is not None else _device_of(parts.model)
    return Snapshot(
        step,
        None if parts.loader is None else parts.loader.position,
        parts.experiment,
        fingerprint(device),
        _copies(_tensors(dicts[WEIGHTS]), WEIGHTS, torch.contiguous_format),
        None
        if parts.average is None
        else _copies(_tensors(dicts[AVERAGE]), AVERAGE, torch.contiguous_format),
        outline,
        _copies(tensors, STATE, torch.preserve_format),
    )


def restore(snapshot: Snapshot, parts: Parts, path: Path) -> dict[str, Any]:
    """Put a snapshot back into the parts: all of it, or, where something does not fit, nothing.

    Args:
        snapshot: from `take_snapshot`, on this or another placement.
        parts: of the same model and experiment; those that are None are left out.
        path: the checkpoint that it was read from, for messages.

    Returns:
        The state that no part was asked to take, by name.

    Raises:
        ConfigError: another experiment, or a part that cannot be loaded into.
        DataError: it does not fit the parts.
    """
    nest = check_fits(snapshot, parts, path)
    targets = {name: target for name, target in parts.state.items() if target is not None}
    _load_or_undo(nest["state"], targets, path)
    parts.model.load_state_dict({**snapshot.weights, **nest["extra"][WEIGHTS]})
    if parts.average is not None and snapshot.average is not None:
        parts.average.load_state_dict({**snapshot.average, **nest["extra"][AVERAGE]})
    if parts.towers is not None:
        parts.towers._step = snapshot.step
    if parts.loader is not None and snapshot.position is not None:
        parts.loader.position = snapshot.position
    return {name: value for name, value in nest["state"].items() if name not in targets}


def check_fits(snapshot: Snapshot, parts: Parts, path: Path) -> dict[str, Any]:
    """Compare a snapshot with the parts that shall take it, without changing them.

    Returns:
        What `Snapshot.state` returns.

    Raises:
        ConfigError: another experiment, or a part that cannot be loaded into.
        DataError: it does not fit the parts.
    """
    nest = snapshot.state()
    check_experiment(snapshot.experiment, parts.experiment, path)
    if parts.loader is not None and snapshot.position is None:
        raise DataError(f"{path}: holds no position, it was saved without a loader")
    modules = {WEIGHTS: (parts.model, snapshot.weights), AVERAGE: (parts.average, snapshot.average)}
    for name, (module, saved) in modules.items():
        if module is None:
            continue
        if saved is None:
            raise DataError(f"{path}: holds no {name}, it was saved without one")
        extra = nest["extra"].get(name)
        if not isinstance(extra, dict) or extra.keys() & saved.keys():
            raise DataError(f"{path}: its extra state of the {name} cannot be {shown(extra)}")
        check_tensors({**saved, **extra}, module.state_dict(), f"{path / name}.safetensors", f"the {name}")
    check_state(nest["state"], nest["kinds"], parts.state, path)
    return nest


def _load_or_undo(state: Mapping[str, Any], targets: Mapping[str, Any], path: Path) -> None:
    done: list[tuple[Any, Any]] = []
    for name, target in targets.items():
        # An optimizer takes new tensors in; others may copy into those that they have.
        before = target.state_dict()
        done.append((target, before if isinstance(target, Optimizer) else copy.deepcopy(before)))
        try:
            target.load_state_dict(state[name])
        except Exception as error:  # whatever the object makes of a state that is not its own
            for changed, former in reversed(done):
                changed.load_state_dict(former)
            why = one_line(f"{type(error).__name__}: {error}")
            raise DataError(f"{path}: its state of {name} does not fit ({why})") from error


def _copies(tensors: Mapping[str, Tensor], part: str, layout: torch.memory_format) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype in _NOT_ON_DISK:
            raise ConfigError(
                f"{part}: {name} is {tensor.layout} {tensor.dtype}, which safetensors cannot hold; keep it "
                "dense, and in another dtype"
            )
        copies[name] = tensor.detach().to("cpu", copy=True, memory_format=layout)
    return copies


def _tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}


def _others(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if not isinstance(entry, Tensor)}


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in _tensors(model.state_dict()).values()), torch.device("cpu"))
