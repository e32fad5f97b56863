"""How a model's own buffers are combined: `Towers(..., buffers={pattern: policy})`.

- `"mean"`: every tower starts the step from the shared value, and what the towers end with is averaged,
  weighted by rows, in float64 along the canonical tree. For floating-point buffers: moving averages,
  codebooks.
- `"first"`: every tower starts the step from the shared value, and what tower 0 ends with is the next one,
  to the bit. For any dtype: queues and their positions, the vectors of spectral norm.
- `"ignore"`: nothing. Every worker starts from worker 0's value when `Towers` is made; from then on a pass
  sees what the pass before it on the same worker left. The buffer's bits may depend on the placement, and
  so may those of the weights if they depend on the buffer.

A tower hands in what the buffer holds when `tower.backward` is called.
Patterns are those of `fnmatch` over the names of `model.named_buffers()`; the first that matches decides.
For statistics of normalisation layers see `samestep.buffers.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from samestep.buffers.named_buffers import NamedBuffer
from samestep.buffers.statistics import is_statistic
from samestep.errors import ConfigError

__all__ = ["Policy", "assign_policies", "check_policies"]

Policy = Literal["mean", "first", "ignore"]

_MOST_NAMES = 20


def check_policies(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> None:
    """Check that each pattern names a policy, and decides for some buffer.

    Args:
        buffers: all of the model's.
        policies: from `fnmatch` patterns over the buffers' names, case-sensitive.

    Raises:
        ConfigError: an unknown policy, or a pattern that decides for no buffer.
    """
    own = [buffer for buffer in buffers if not is_statistic(buffer)]
    decided: set[str] = set()
    for pattern, policy in policies.items():
        if policy not in get_args(Policy):
            raise ConfigError(
                f"buffers[{pattern!r}] = {policy!r}: expected one of {', '.join(get_args(Policy))}"
            )
        found = {buffer.name for buffer in own if fnmatchcase(buffer.name, pattern)} - decided
        if not found:
            raise _no_effect(pattern, buffers, own)
        decided |= found


def assign_policies(
    buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]
) -> dict[Policy, list[NamedBuffer]]:
    """Return the buffers under each policy; the first pattern that matches a buffer's name decides.

    Raises:
        ConfigError: "mean" for a buffer that is not floating-point, or a buffer that has no value yet.
    """
    assigned: dict[Policy, list[NamedBuffer]] = {policy: [] for policy in get_args(Policy)}
    for buffer in buffers:
        pattern = next((pattern for pattern in policies if fnmatchcase(buffer.name, pattern)), None)
        if pattern is not None and not is_statistic(buffer):
            _check(buffer, pattern, policies[pattern])
            assigned[policies[pattern]].append(buffer)
    return assigned


def _check(buffer: NamedBuffer, pattern: str, policy: Policy) -> None:
    tensor = buffer.get()
    if tensor is None and policy != "ignore":
        raise ConfigError(
            f"buffers[{pattern!r}] = {policy!r}: {buffer.name} has no value before the first forward; "
            "run the model once before making Towers, or use 'ignore'"
        )
    if policy == "mean" and tensor is not None and not tensor.is_floating_point():
        raise ConfigError(
            f"buffers[{pattern!r}] = 'mean': {buffer.name} is {tensor.dtype}, and only floating-point "
            f"buffers can be averaged; put {buffer.name!r}: 'first' before it"
        )


def _no_effect(pattern: str, buffers: Sequence[NamedBuffer], own: Sequence[NamedBuffer]) -> ConfigError:
    matched = [buffer.name for buffer in buffers if fnmatchcase(buffer.name, pattern)]
    if any(buffer.name in matched for buffer in own):
        return ConfigError(
            f"buffers[{pattern!r}] has no effect: earlier patterns match {_list(matched)}; put it first, or "
            "remove it"
        )
    if matched:
        return ConfigError(
            f"buffers[{pattern!r}] matches only {_list(matched)}, of normalisation layers: use the "
            "statistics argument for those"
        )
    return ConfigError(
        f"buffers[{pattern!r}] matches no buffer: the model has {_list([buffer.name for buffer in own])}"
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none of its own") + more
