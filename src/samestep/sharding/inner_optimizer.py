"""The plain optimizer that updates one worker's shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import UsageError
from samestep.sharding.own_state import OwnState
from samestep.sharding.separable import check_groups
from samestep.sharding.shards import Shard
from samestep.streams import GlobalStreams

__all__ = ["InnerOptimizer", "group_of", "settings_in"]

_SCALING = ("grad_scale", "found_inf")
"""Attributes that a `GradScaler` sets for one step of an optimizer that unscales gradients itself."""


class InnerOptimizer:
    """An optimizer of a worker's shards, in an outer optimizer of whole parameters.

    Both have the same state, and groups with the same settings; programs use those of the outer one.

    Args:
        outer: the outer optimizer.
        optimizer_class: the class of the inner one.
        shards: in each of the groups of `outer`.
        elsewhere: ids of parameters that other workers update, fully or in part.
        defaults: other arguments of the class.

    Attributes:
        optimizer: the inner optimizer.

    Raises:
        ConfigError: the class has made other groups.
    """

    def __init__(
        self,
        outer: Optimizer,
        optimizer_class: type[Optimizer],
        shards: Sequence[Sequence[Shard]],
        elsewhere: Set[int],
        defaults: Mapping[str, Any],
    ) -> None:
        self._outer = outer
        self._groups = list(shards)
        self._elsewhere = elsewhere
        groups = [group_of(group, own) for group, own in zip(outer.param_groups, shards, strict=True)]
        self.optimizer = optimizer_class(groups, **defaults)
        check_groups(self.optimizer, self._groups)
        self._share_state(self.optimizer.state)
        self._share_settings()

    @property
    def shards(self) -> list[Shard]:
        """Return those of all groups."""
        return list(chain.from_iterable(self._groups))

    def add_group(self, shards: Sequence[Shard], given: Set[str]) -> None:
        """Add the last group of the outer optimizer.

        Args:
            shards: this worker's.
            given: the names of settings that were given; the class adds others by itself.

        Raises:
            ConfigError: the class has made another group.
        """
        self._groups.append(shards)
        group = group_of(self._outer.param_groups[-1], shards)
        self.optimizer.add_param_group({name: group[name] for name in group.keys() & given})
        check_groups(self.optimizer, self._groups)
        self._share_settings()

    # ---- an update -----------------------------------------------------------------------------------

    def take_state(self) -> None:
        """Take over the outer optimizer's state, if the program has replaced it, for example to clear it.

        Raises:
            UsageError: it is not a state of these shards.
        """
        state = self._outer.state
        if state is self.optimizer.state:
            return
        known = {id(shard.tensor) for shard in self.shards}
        if not isinstance(state, defaultdict) or any(id(key) not in known for key in state):
            raise UsageError(
                "optimizer.state was replaced by one that does not belong to this worker's shards: use "
                "load_state_dict(), on all workers, or an empty defaultdict(dict) to start over"
            )
        self._share_state(state)

    def step(self, device: torch.device) -> None:
        """Update the shards that have a gradient, with the outer optimizer's settings and scale.

        Args:
            device: its generator is watched, too.

        Raises:
            UsageError: the update draws random numbers.
        """
        outer, inner, shards = self._outer, self.optimizer, self.shards
        scaling = {name: getattr(outer, name) for name in _SCALING if hasattr(outer, name)}
        vars(inner).update(scaling)
        for of_outer, own in zip(outer.param_groups, inner.param_groups, strict=True):
            own.update(settings_in(of_outer))
        for shard in shards:
            shard.begin()
        may_draw = not type(inner).__module__.startswith("torch.")
        before = GlobalStreams.capture(device) if may_draw else None
        try:
            step: Any = type(inner).step
            # Without torch's global hooks, which have already run for the outer one.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(inner)
        finally:
            for shard in shards:
                shard.end()
            for name in scaling:
                delattr(inner, name)
        if before is not None and before.has_changed():
            raise UsageError(
                f"{type(inner).__name__} draws random numbers in step(), which each worker would draw for "
                "its own shards: use the optimizer itself, not sharded"
            )
        self._share_settings()

    def _share_state(self, state: Mapping[Tensor, Any]) -> None:
        self._outer.state = self.optimizer.state = OwnState(state, self._elsewhere)

    def _share_settings(self) -> None:
        """Copy the settings to the outer optimizer; the inner one may have changed them."""
        for of_outer, own in zip(self._outer.param_groups, self.optimizer.param_groups, strict=True):
            of_outer.update(settings_in(own))

    # ---- state ---------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the shards' parts of a plain optimizer's state, which has the groups of the outer one."""
        state: dict[int, Any] = {}
        own_groups, number = [], 0
        for group, saved, shards in zip(
            self._outer.param_groups, state_dict["param_groups"], self._groups, strict=True
        ):
            keys = dict(zip(map(id, group["params"]), saved["params"], strict=True))
            numbers = range(number, number + len(shards))
            entries = [state_dict["state"].get(keys[id(shard.parameter)]) for shard in shards]
            parts = zip(numbers, shards, entries, strict=True)
            state |= {n: shard.part_of(entry) for n, shard, entry in parts if entry is not None}
            own_groups.append({**settings_in(saved), "params": [*numbers]})
            number += len(shards)
        self.optimizer.load_state_dict({"state": state, "param_groups": own_groups})
        self._share_state(self.optimizer.state)

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the current state and settings after others were loaded."""
        inner = self.optimizer
        state, groups = inner.state, inner.param_groups

        def put_back() -> None:
            inner.state, inner.param_groups, self._outer.state = state, groups, state

        return put_back


def group_of(group: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """Return a group of parameters with shards in their place."""
    return {**settings_in(group), "params": [shard.tensor for shard in shards]}


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
