"""What a program may change before a step is taken, kept to be restored if the step has to be repeated."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.batches.nest import are_same
from samestep.checkpoint.added_groups import remove_groups
from samestep.checkpoint.objects import state_of
from samestep.data.loader import TowerLoader
from samestep.data.stream_loader import StreamLoader
from samestep.towers.towers import Towers

__all__ = ["copied", "set_small_state", "small_state"]

_PLAIN = frozenset({bool, int, float, str, type(None)})


def small_state(each: Any) -> Any:
    """Return an object's state; of an optimizer, only the options of its groups; of a loader, in its loop."""
    if isinstance(each, TowerLoader | StreamLoader):
        return each._state(in_loop=True)
    if not isinstance(each, Optimizer):
        return state_of(each)
    groups = each.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def copied(state: Any) -> Any:
    """Return a deep copy; dicts, lists and plain values without `deepcopy`, which memoizes every one."""
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {key: copied(value) for key, value in state.items()}
    if kind is list:
        return [copied(value) for value in state]
    return copy.deepcopy(state)


def set_small_state(each: Any, state: Any) -> None:
    """Restore what `small_state` returned; `state` may be used again.

    An object of the user's that has this state keeps it: its lists may be in use, as in
    `history.losses.append(elastic(step))`, which finds the list before the call.
    """
    if isinstance(each, Optimizer):
        _set_options(each, state)
    elif isinstance(each, Towers | TowerLoader | StreamLoader) or not are_same(state_of(each), state):
        each.load_state_dict(copy.deepcopy(state))


def _set_options(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    remove_groups(optimizer, len(groups))
    for group, noted in zip(optimizer.param_groups, groups, strict=False):
        for name, value in noted.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)  # in place: a scheduler may hold this tensor
            else:
                group[name] = value
