"""The objects in a checkpoint, and how to get and load their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from samestep.data.loader import TowerLoader
from samestep.data.stream_loader import StreamLoader
from samestep.identity import plain_names, uncompiled
from samestep.sharding.sharded_optimizer import ShardedOptimizer
from samestep.streams import GlobalStreams
from samestep.towers.towers import Towers

__all__ = [
    "ADDED",
    "AVERAGES",
    "WEIGHTS",
    "GlobalGenerators",
    "TrainingObjects",
    "class_of",
    "kind_of",
    "load_state",
    "state_of",
]

ADDED = "what Towers(also=...) adds"
"""The name of that part of a checkpoint; for towers passed under a name of their own, this follows."""

WEIGHTS, AVERAGES = "model", "averaged_model"
"""Names of the modules with a tensor file of their own, and of these files."""


@dataclass(frozen=True, kw_only=True)
class TrainingObjects:
    """The objects in a checkpoint; see `samestep.save`.

    Attributes:
        model: the model in training.
        towers: hold T, the seed, the step, the noise scale, and what `also` adds to the model.
        loader: holds the position and the settings it depends on; any object with a `state_dict` works.
        averaged_model: torch's `AveragedModel`, or another module with the averages.
        rng: whether to include the process's global generators.
        state: objects with a `state_dict`, or plain values, by name; None is left out.
    """

    model: nn.Module
    towers: Towers | None = None
    loader: Any = None
    averaged_model: nn.Module | None = None
    rng: bool = False
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the towers, or else of the model's first tensor."""
        if self.towers is not None:
            return self.towers.job.device
        tensors = (entry for entry in self.model.state_dict().values() if isinstance(entry, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def modules(self) -> dict[str, nn.Module | None]:
        """The modules with a tensor file of their own, by the file's name."""
        averaged = uncompiled(self.averaged_model)
        averages = averaged.module if isinstance(averaged, AveragedModel) else averaged
        return {WEIGHTS: self.model, AVERAGES: averages}

    @property
    def all_towers(self) -> list[Towers]:
        """The `Towers` among them."""
        return [each for each in (self.towers, *self.state.values()) if isinstance(each, Towers)]

    @property
    def compared(self) -> list[tuple[Towers, dict[str, nn.Module]]]:
        """Each of the `Towers`, with the modules, by name, to be compared together with its model.

        The first one has those that are no model of any `Towers`: averages of weights, and other nets.
        """
        models = [each.model for each in self.all_towers]
        found = {AVERAGES: self.averaged_model, **self.state}
        beside = {name: each for name, each in found.items() if isinstance(each, nn.Module)}
        beside = {n: each for n, each in beside.items() if not any(each is model for model in models)}
        return [(towers, {} if number else beside) for number, towers in enumerate(self.all_towers)]

    @property
    def own(self) -> dict[str, Any]:
        """The objects of samestep itself, besides the modules, by name."""
        averaged = uncompiled(self.averaged_model)
        found = {
            "towers": self.towers,
            **self._added(),
            "the model's settings": None if self.towers is None else ComparedSettings(self.towers),
            "loader": self.loader,
            AVERAGES: AverageCount(averaged) if isinstance(averaged, AveragedModel) else None,
            "rng": GlobalGenerators(self.device) if self.rng else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _added(self) -> dict[str, nn.Module | None]:
        """What `Towers(also=...)` adds to the models, by what a checkpoint calls it."""
        found = {} if self.towers is None else {ADDED: self.towers._added()}
        others = {name: each for name, each in self.others.items() if isinstance(each, Towers)}
        return found | {f"{ADDED} for {name}": each._added() for name, each in others.items()}

    @property
    def others(self) -> dict[str, Any]:
        """The user's objects and values, by name."""
        return {name: value for name, value in self.state.items() if value is not None}

    @property
    def are_sharded(self) -> bool:
        """Whether some state is sharded, so that no worker has all of it."""
        return any(isinstance(value, ShardedOptimizer) for value in self.state.values())

    def gathered(self) -> TrainingObjects:
        """Return the objects with sharded state gathered on worker 0; all workers must call this."""
        state = {n: Gathered.of(v) if isinstance(v, ShardedOptimizer) else v for n, v in self.state.items()}
        return replace(self, state=state)


@dataclass(frozen=True)
class Gathered:
    """Stands in for a sharded optimizer, with the state of all workers' shards."""

    optimizer: ShardedOptimizer
    state: dict[str, Any]

    @classmethod
    def of(cls, optimizer: ShardedOptimizer) -> Gathered:
        """Gather an optimizer's state on worker 0."""
        return cls(optimizer, optimizer._gathered([0]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as of the unsharded optimizer; complete on worker 0 only."""
        return self.state


@dataclass(frozen=True)
class ComparedSettings:
    """What the model is set to beside its tensors: loading sets nothing, but the next step compares."""

    towers: Towers

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the last step; None before the first one."""
        return {"settings": self.towers._settings_of_model()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next step warn where the model is set to something else."""
        self.towers._expect(state["settings"])


@dataclass(frozen=True)
class AverageCount:
    """The state of an `AveragedModel` besides the averages: the number of updates."""

    averaged_model: AveragedModel

    def state_dict(self) -> dict[str, Any]:
        """Return all entries except the averages."""
        entries = self.averaged_model.state_dict()
        return {name: entry for name, entry in entries.items() if not name.startswith("module.")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the entries, and keep the averages."""
        entries = self.averaged_model.state_dict()
        averages = {name: entry for name, entry in entries.items() if name.startswith("module.")}
        self.averaged_model.load_state_dict({**averages, **state})


@dataclass(frozen=True)
class GlobalGenerators:
    """The global generators of this process, as an object with a state."""

    device: torch.device

    def state_dict(self) -> dict[str, Any]:
        """Return their states."""
        return GlobalStreams.capture(self.device).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore their states."""
        GlobalStreams.from_state_dict(state, self.device).restore()


def state_of(value: Any) -> Any:
    """Return an object's state, or a plain value itself; `torch.compile` does not change a module's names."""
    if not hasattr(value, "state_dict"):
        return value
    if isinstance(value, TowerLoader | StreamLoader):
        return value._state()  # `save` itself warns of batches that are not used
    state = value.state_dict()
    if isinstance(value, nn.Module):
        return plain_names(state)
    return in_order(state) if isinstance(value, Optimizer) else state


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """Sort an optimizer's state by parameter; torch orders it by each parameter's first update."""
    entries = state.get("state")
    if isinstance(entries, dict) and all(isinstance(key, int) for key in entries):
        return {**state, "state": dict(sorted(entries.items()))}
    return state


def load_state(target: Any, state: Any) -> None:
    """Load a state from `state_of` into an object, compiled or not."""
    if isinstance(target, nn.Module):
        entries = target.state_dict()
        state = {name: state[plain] for plain, name in zip(plain_names(entries), entries, strict=True)}
    target.load_state_dict(state)


def kind_of(value: Any) -> str:
    """Return the name of an object's type; see `class_of`."""
    return class_of(value).__qualname__


def class_of(value: Any) -> type:
    """Return an object's type, seen through `torch.compile` and optimizer sharding."""
    value = value.optimizer if isinstance(value, Gathered) else uncompiled(value)
    return value.optimizer_class if isinstance(value, ShardedOptimizer) else type(value)
