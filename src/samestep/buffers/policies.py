"""What becomes of a model's own buffers: `Towers(..., buffers={pattern: rule})`.

- `"mean"`: every tower starts the step from the shared value, and what the towers end with is averaged,
  weighted by rows, in float64 along the canonical tree. For floating-point buffers: moving averages,
  codebooks.
- `"first"`: every tower starts the step from the shared value, and what tower 0 ends with is the next one,
  to the bit. For any dtype: queues and their positions, the vectors of spectral norm.
- `"ignore"`: nothing. Every worker starts from worker 0's value when `Towers` is made; from then on a pass
  sees what the pass before it on the same worker left. The buffer's bits may depend on the placement, and
  so may those of the weights if they depend on the buffer.

What counts is what a buffer holds when `tower.backward` is called.
Patterns are those of `fnmatch` over the names of `model.named_buffers()`; the first that matches decides.
Statistics of normalisation layers are not asked for here: they are `samestep.buffers.statistics`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor

from samestep.buffers.slots import SharedBuffers, Slot
from samestep.buffers.statistics import is_statistic
from samestep.errors import ConfigError
from samestep.workers.job import Job
from samestep.workers.transport import Transport

__all__ = ["FirstBuffers", "Rule", "assign_rules"]

Rule = Literal["mean", "first", "ignore"]

_MOST_NAMES = 20


def assign_rules(slots: Sequence[Slot], rules: Mapping[str, Rule]) -> dict[Rule, list[Slot]]:
    """Return the buffers under each rule; the first pattern that matches a buffer's name decides.

    Args:
        slots: all of the model's.
        rules: from `fnmatch` patterns over the buffers' names, upper and lower case told apart.

    Raises:
        ConfigError: a rule that does not exist, a pattern that decides about no buffer, "mean" for a buffer
            that is not floating-point, or a buffer that has no value yet.
    """
    own = [slot for slot in slots if not is_statistic(slot)]
    assigned: dict[Rule, list[Slot]] = {rule: [] for rule in get_args(Rule)}
    taken: set[str] = set()
    for pattern, rule in rules.items():
        if rule not in assigned:
            raise ConfigError(f"buffers[{pattern!r}] = {rule!r}: expected one of {', '.join(assigned)}")
        found = [slot for slot in own if fnmatchcase(slot.name, pattern) and slot.name not in taken]
        if not found:
            raise _no_effect(pattern, slots, own)
        for slot in found:
            _check(slot, pattern, rule)
        assigned[rule] += found
        taken |= {slot.name for slot in found}
    return assigned


def _check(slot: Slot, pattern: str, rule: Rule) -> None:
    buffer = slot.get()
    if buffer is None and rule != "ignore":
        raise ConfigError(
            f"buffers[{pattern!r}] = {rule!r}: {slot.name} has no value until a forward gives it one; run "
            "the model once before making Towers, or use 'ignore'"
        )
    if rule == "mean" and buffer is not None and not buffer.is_floating_point():
        raise ConfigError(
            f"buffers[{pattern!r}] = 'mean': {slot.name} is {buffer.dtype}, and only floating-point buffers "
            f"can be averaged; put {slot.name!r}: 'first' before it"
        )


def _no_effect(pattern: str, slots: Sequence[Slot], own: Sequence[Slot]) -> ConfigError:
    matched = [slot.name for slot in slots if fnmatchcase(slot.name, pattern)]
    if any(slot.name in matched for slot in own):
        return ConfigError(
            f"buffers[{pattern!r}] has no effect: patterns before it decide about {_list(matched)}; put it "
            "first, or leave it out"
        )
    if matched:
        return ConfigError(
            f"buffers[{pattern!r}] matches only {_list(matched)}, of normalisation layers: the statistics "
            "argument decides about those"
        )
    return ConfigError(
        f"buffers[{pattern!r}] matches no buffer: the model has {_list([slot.name for slot in own])}"
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none of its own") + more


class FirstBuffers(SharedBuffers):
    """Buffers that take over what tower 0 ends with, to the bit, whatever their dtype.

    The worker with tower 0 sends its bytes at the end of the step. They do not go with what is added in
    float64, because a queue may be large, and float64 does not hold every int64.

    Args:
        slots: none of them empty.
        job: whose worker 0 runs tower 0.
    """

    num_values = 0

    def __init__(self, slots: Sequence[Slot], job: Job) -> None:
        super().__init__(slots)
        self._ended = [shared.clone(memory_format=torch.contiguous_format) for shared in self.shared]
        self._job = job
        self._transport = Transport(job)

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Keep what tower 0 ends with; return nothing, float64 [0]."""
        self.check()
        if tower == 0:
            torch._foreach_copy_(self._ended, self.values())
        return torch.zeros(0, dtype=torch.float64, device=self._job.device)

    def finish(self, totals: Tensor, rows: int) -> None:
        """Give every worker tower 0's values."""
        if self._job.world_size > 1:
            contents = [ended.reshape(-1).view(torch.uint8) for ended in self._ended]
            outgoing = {worker: contents if self._job.rank == 0 else [] for worker in self._transport.others}
            incoming = {worker: contents if worker == 0 else [] for worker in self._transport.others}
            self._transport.post(outgoing, incoming, "tower 0's buffers").wait()
        self.write(self._ended)
