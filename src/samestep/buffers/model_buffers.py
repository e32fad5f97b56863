"""A model's buffers in a step: every tower starts from the shared values; the results are combined."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.buffers.counters import Counters, is_counter
from samestep.buffers.named_tensors import NamedBuffer, find_named_buffers, reader
from samestep.buffers.policies import Policy, assign_policies
from samestep.buffers.shared import AveragedBuffers, FirstBuffers, SharedBuffers
from samestep.buffers.statistics import Mode, PooledNorm, find_statistics, is_statistic
from samestep.errors import BufferPolicyError
from samestep.summation.plan import BufferLayout
from samestep.workers.job import Job

__all__ = ["ModelBuffers"]


_KIND = attrgetter("shape", "dtype")


class ModelBuffers:
    """All buffers of a model.

    Statistics of normalisation layers are averaged or pooled (`samestep.buffers.statistics`). Buffers with a
    policy follow it (`samestep.buffers.policies`). Other integer buffers of one element are counters
    (`samestep.buffers.counters`). No other buffer may change.
    """

    layout: BufferLayout  # what each tower contributes
    fixed: list[NamedBuffer]  # no pass may change these
    shared: list[NamedBuffer]  # passes may change these; between steps all workers have the same values

    def __init__(self, model: nn.Module, mode: Mode, policies: Mapping[str, Policy], job: Job) -> None:
        self._nothing = torch.zeros(0, dtype=torch.float64, device=job.device)
        self._norms = [(n, module) for n, module in model.named_modules() if isinstance(module, _NormBase)]
        self._modes = self._current_modes()
        buffers = find_named_buffers(model)
        assigned = assign_policies(buffers, policies)
        self._handed_in = [buffer for buffer in buffers if assigned.get(buffer.name) != "ignore"]
        self._current = reader(self._handed_in)
        self._kinds, self._memory = self._current_kinds(), self._current_memory()
        self._collectors: list[AveragedBuffers | PooledNorm | FirstBuffers] = [*find_statistics(model, mode)]
        if mean := [buffer for buffer in buffers if assigned.get(buffer.name) == "mean"]:
            self._collectors.append(AveragedBuffers(mean))
        if first := [buffer for buffer in buffers if assigned.get(buffer.name) == "first"]:
            self._collectors.append(FirstBuffers(first, job))
        others = [buffer for buffer in buffers if buffer.name not in assigned]
        self._counters = Counters([buffer for buffer in others if is_counter(buffer)], mode, job)
        self._shared: list[SharedBuffers] = [*self._collectors, self._counters]
        self.fixed = [b for b in others if not is_counter(b) and not _is_in_training(b)]
        fixed = {buffer.name for buffer in self.fixed}
        self.shared = [buffer for buffer in self._handed_in if buffer.name not in fixed]
        self.layout = BufferLayout(
            tuple((buffer.name, _describe(buffer, assigned.get(buffer.name))) for buffer in buffers),
            len(self._counters.shared),
            sum(collector.num_values for collector in self._collectors),
            tuple((b.name, "training" if b.module.training else "eval") for b in buffers if is_statistic(b)),
        )

    @property
    def are_current(self) -> bool:
        """Whether layers' modes and buffers' shapes and dtypes are the same as at construction."""
        if self._current_modes() != self._modes:
            return False
        memory = self._current_memory()
        if memory == self._memory:
            return True
        self._memory = memory
        return self._current_kinds() == self._kinds

    def _current_modes(self) -> list[bool]:
        return [norm.training for _, norm in self._norms]

    def _current_memory(self) -> list[int]:
        """Return addresses and sizes: quick to read, and different if a buffer's shape or dtype changed."""
        found = [tensor for tensor in self._current() if tensor is not None]
        return [*map(Tensor.data_ptr, found), *map(Tensor.numel, found)]

    def _current_kinds(self) -> list[tuple[object, object] | None]:
        return [None if tensor is None else _KIND(tensor) for tensor in self._current()]

    def start_step(self) -> None:
        """Record the shared values, before the first pass."""
        for buffers in self._shared:
            buffers.start_step()

    def start_tower(self) -> None:
        """Restore the shared values, before each pass."""
        for buffers in self._shared:
            buffers.start_tower()

    def end_passes(self) -> None:
        """Undo changes to the layers, such as hooks, after the last pass."""
        for buffers in self._shared:
            buffers.end_passes()

    def put_back(self) -> None:
        """Restore the values from before the step in all buffers except those with the policy "ignore"."""
        for buffers in self._shared:
            buffers.put_back()

    def moments(self, tower: int, rows: int) -> Tensor:
        """Return the contribution of the tower that just ran, float64 [S]."""
        thawed = [
            name or "the model"
            for (name, norm), was_training in zip(self._norms, self._modes, strict=True)
            if norm.training and not was_training and norm.running_mean is not None
        ]
        if thawed:
            raise BufferPolicyError(
                f"tower {tower} ran {', '.join(thawed)} in training mode, but the step began in eval mode: "
                "switch modes between steps"
            )
        parts = [collector.contribution(tower, rows) for collector in self._collectors]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, self._nothing])

    def changed(self) -> set[str]:
        """Return the names of buffers that this pass has changed, except those with the policy "ignore"."""
        return set[str]().union(*(buffers.changed() for buffers in self._shared))

    def counters(self) -> Tensor:
        """Return the increments of the counters in this pass, int64 [counters]."""
        return self._counters.increments()

    def finish(self, totals: Tensor, rows: int, counters: Tensor) -> None:
        """Compute and write the new shared values; raise if counters differ between towers.

        Args:
            totals: the sum of the towers' moments, float64 [S].
            rows: the number of rows of the global batch.
            counters: the increments of the towers that have rows, float64 [towers, counters].
        """
        self._counters.add(counters)
        parts = totals.split([collector.num_values for collector in self._collectors])
        for collector, part in zip(self._collectors, parts, strict=False):
            collector.finish(part, rows)


def _describe(buffer: NamedBuffer, policy: Policy | None) -> str:
    if policy == "ignore":
        return policy
    tensor = buffer.get()
    kind = "empty" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
    return kind if policy is None else f"{kind}, {policy}"


def _is_in_training(buffer: NamedBuffer) -> bool:
    """Return whether a buffer is a statistic of a layer in training mode."""
    return is_statistic(buffer) and buffer.module.training
