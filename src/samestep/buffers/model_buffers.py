"""A model's buffers through a step: shared at its start, each tower's own during it, then shared again."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.buffers.counters import Counters, is_counter
from samestep.buffers.named_buffers import NamedBuffer, find_named_buffers, reader
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

    Statistics of normalisation layers are averaged or pooled (`samestep.buffers.statistics`), buffers with a
    policy follow it (`samestep.buffers.policies`), other integer buffers of one element count on from the
    shared value in every tower, and no other buffer may change.
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
        )

    @property
    def are_current(self) -> bool:
        """Whether layers' modes and buffers' shapes and dtypes are as they were when this was made."""
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
        """Return numbers that change if a buffer's kind does, and are quick to read: addresses and sizes."""
        found = [tensor for tensor in self._current() if tensor is not None]
        return [*map(Tensor.data_ptr, found), *map(Tensor.numel, found)]

    def _current_kinds(self) -> list[tuple[object, object] | None]:
        return [None if tensor is None else _KIND(tensor) for tensor in self._current()]

    def start_step(self) -> None:
        """Note the shared values, before the first pass."""
        for buffers in self._shared:
            buffers.start_step()

    def start_tower(self) -> None:
        """Put the shared values back, before each pass."""
        for buffers in self._shared:
            buffers.start_tower()

    def end_passes(self) -> None:
        """Leave the layers as they were found, after the last pass."""
        for buffers in self._shared:
            buffers.end_passes()

    def put_back(self) -> None:
        """Give all buffers but those to be ignored the values from before the step, after its passes."""
        for buffers in self._shared:
            buffers.put_back()

    def moments(self, tower: int, rows: int) -> Tensor:
        """Return what the tower that just ran hands in, float64 [S]."""
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
        """Return the names of the buffers that this pass has changed, but for those to be ignored."""
        return set[str]().union(*(buffers.changed() for buffers in self._shared))

    def counters(self) -> Tensor:
        """Return by how much the integer buffers of one element have counted on in this pass."""
        return self._counters.counted()

    def finish(self, totals: Tensor, rows: int, counters: Tensor) -> None:
        """Write the new shared values, if all towers counted alike.

        Args:
            totals: the sum of the towers' moments, float64 [S].
            rows: of the global batch.
            counters: what each tower that had rows counted, float64 [towers, counters].
        """
        self._counters.count_on(counters)
        parts = totals.split([collector.num_values for collector in self._collectors])
        for collector, part in zip(self._collectors, parts, strict=False):
            collector.finish(part, rows)


def _describe(buffer: NamedBuffer, policy: Policy | None) -> str:
    if policy == "ignore":
        return policy
    tensor = buffer.get()
    kind = "empty" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
    mode = ", in training" if _is_in_training(buffer) else ""
    return f"{kind}{mode}{'' if policy is None else f', {policy}'}"


def _is_in_training(buffer: NamedBuffer) -> bool:
    """Say whether it is a statistic of a layer that updates it."""
    return is_statistic(buffer) and buffer.module.training
