"""A model's buffers through a step: shared at its start, each tower's own during it, then shared again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.buffers.counters import Counters, is_counter
from samestep.buffers.named_buffers import NamedBuffer, find_named_buffers
from samestep.buffers.policies import Policy, assign_policies
from samestep.buffers.shared import AveragedBuffers, FirstBuffers
from samestep.buffers.statistics import Mode, find_statistics, is_statistic
from samestep.buffers.watch import BufferWatch
from samestep.errors import BufferPolicyError
from samestep.summation.plan import BufferLayout
from samestep.workers.job import Job

__all__ = ["ModelBuffers"]


class ModelBuffers:
    """All buffers of a model.

    Statistics of normalisation layers are averaged or pooled (`samestep.buffers.statistics`), buffers with a
    policy follow it (`samestep.buffers.policies`), other integer buffers of one element count on from the
    shared value in every tower, and no other buffer may change.

    Args:
        model: owner of the buffers.
        mode: what becomes of running statistics.
        policies: what becomes of the model's own buffers.
        job: in which it is trained.

    Attributes:
        layout: what towers hand in of them.
    """

    def __init__(self, model: nn.Module, mode: Mode, policies: Mapping[str, Policy], job: Job) -> None:
        self._nothing = torch.zeros(0, dtype=torch.float64, device=job.device)
        self._norms = [(n, module) for n, module in model.named_modules() if isinstance(module, _NormBase)]
        self._modes = [norm.training for _, norm in self._norms]
        buffers = find_named_buffers(model)
        by_policy = assign_policies(buffers, policies)
        ignored = {buffer.name for buffer in by_policy["ignore"]}
        self._handed_in = [buffer for buffer in buffers if buffer.name not in ignored]
        self._kinds = self._current_kinds()
        self._collectors = find_statistics(model, mode)
        if by_policy["mean"]:
            self._collectors.append(AveragedBuffers(by_policy["mean"]))
        if by_policy["first"]:
            self._collectors.append(FirstBuffers(by_policy["first"], job))
        with_policy = {buffer.name for each in by_policy.values() for buffer in each}
        others = [buffer for buffer in buffers if buffer.name not in with_policy]
        self._counters = Counters([buffer for buffer in others if is_counter(buffer)], mode, job)
        self._watch = BufferWatch(
            [buffer for buffer in others if not is_counter(buffer) and not _is_in_training(buffer)]
        )
        names = {buffer.name: policy for policy, each in by_policy.items() for buffer in each}
        self.layout = BufferLayout(
            tuple(f"{buffer.name} {self._describe(buffer, names.get(buffer.name))}" for buffer in buffers),
            len(self._counters.names),
            sum(collector.num_values for collector in self._collectors),
        )

    @staticmethod
    def _describe(buffer: NamedBuffer, policy: Policy | None) -> str:
        tensor = buffer.get()
        if policy == "ignore":
            return policy
        kind = "empty" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        mode = ", in training" if _is_in_training(buffer) else ""
        return f"{kind}{mode}{'' if policy is None else f', {policy}'}"

    @property
    def are_current(self) -> bool:
        """Whether layers' modes and buffers' shapes and dtypes are as they were when this was made."""
        modes = [norm.training for _, norm in self._norms]
        return modes == self._modes and self._current_kinds() == self._kinds

    def _current_kinds(self) -> list[tuple[object, object] | None]:
        tensors = [buffer.get() for buffer in self._handed_in]
        return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]

    def start_step(self) -> None:
        """Note the shared values, before the first pass."""
        for collector in self._collectors:
            collector.start_step()
        self._counters.start_step()
        self._watch.start_step()

    def start_tower(self) -> None:
        """Put the shared values back, before each pass."""
        for collector in self._collectors:
            collector.start_tower()
        self._counters.start_tower()

    def end_passes(self) -> None:
        """Leave the layers as they were found, after the last pass."""
        for collector in self._collectors:
            collector.end_passes()

    def put_back(self) -> None:
        """Give all buffers but those to be ignored the values from before the step, after its passes."""
        for collector in self._collectors:
            collector.put_back()
        self._counters.put_back()

    def moments(self, tower: int, rows: int) -> Tensor:
        """Return what the tower that just ran hands in, float64 [S].

        Raises:
            BufferPolicyError: it changed a buffer that has no policy, or a layer's mode.
        """
        if [norm.training for _, norm in self._norms] != self._modes:
            self._check_modes(tower)
        self._watch.check(f"tower {tower}")
        parts = [collector.contribution(tower, rows) for collector in self._collectors]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, self._nothing])

    def _check_modes(self, tower: int) -> None:
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

    def counters(self) -> Tensor:
        """Return by how much the integer buffers of one element have counted on in this pass."""
        return self._counters.counted()

    def finish(self, totals: Tensor, rows: int, towers: Sequence[int], counters: Tensor) -> None:
        """Write the new shared values.

        Args:
            totals: the sum of the towers' moments, float64 [S].
            rows: of the global batch.
            towers: those that had rows.
            counters: what each of them counted, float64 [len(towers), counters].

        Raises:
            BufferPolicyError: towers ended with different counters, or a pass changed a buffer.
        """
        self._watch.end_step()
        self._counters.finish(towers, counters)
        parts = totals.split([collector.num_values for collector in self._collectors])
        for collector, part in zip(self._collectors, parts, strict=False):
            collector.finish(part, rows)


def _is_in_training(buffer: NamedBuffer) -> bool:
    """Say whether it is a statistic of a layer that updates it."""
    return is_statistic(buffer) and buffer.module.training
