"""A model's buffers through a step: shared at its start, each tower's own during it, then shared again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.buffers.policies import FirstBuffers, Rule, assign_rules
from samestep.buffers.slots import SharedBuffers, Slot, find_slots
from samestep.buffers.statistics import AveragedBuffers, Mode, Statistics, find_statistics, is_statistic
from samestep.buffers.watch import BufferWatch
from samestep.errors import BufferError
from samestep.workers.job import Job

__all__ = ["Buffers"]


class Buffers:
    """All buffers of a model.

    Statistics of normalisation layers are averaged or pooled (`samestep.buffers.statistics`), buffers with a
    rule follow it (`samestep.buffers.policies`), other integer buffers of one element count on from the
    shared value in every tower, and no other buffer may change.

    Args:
        model: whose buffers.
        mode: what becomes of running statistics.
        rules: what becomes of the model's own buffers.
        job: in which it is trained.

    Attributes:
        max_moments: more numbers than a tower ever hands in.
    """

    def __init__(self, model: nn.Module, mode: Mode, rules: Mapping[str, Rule], job: Job) -> None:
        self._model = model
        self._mode = mode
        self._nothing = torch.zeros(0, dtype=torch.float64, device=job.device)
        self._norms = {n: module for n, module in model.named_modules() if isinstance(module, _NormBase)}
        self._training: list[bool] | None = None
        slots = find_slots(model)
        ruled = assign_rules(slots, rules)
        self._ruled: list[Statistics] = [AveragedBuffers(ruled["mean"])] if ruled["mean"] else []
        self._ruled += [FirstBuffers(ruled["first"], job)] if ruled["first"] else []
        self._collectors = self._ruled
        names = {slot.name for slots_of_rule in ruled.values() for slot in slots_of_rule}
        unruled = [slot for slot in slots if slot.name not in names]
        self._counters = Counters([slot for slot in unruled if _is_counter(slot)], mode, job)
        self._may_not_change = [slot for slot in unruled if not _is_counter(slot)]
        self._watch = BufferWatch([])
        self.max_moments = sum(collector.num_values for collector in self._ruled)
        self.max_moments += sum(1 + 2 * norm.num_features for norm in self._norms.values())

    @property
    def num_training(self) -> int:
        """How many normalisation layers are in training mode."""
        return sum(self._training or [])

    @property
    def num_moments(self) -> int:
        """How many numbers a tower hands in, S."""
        return sum(collector.num_values for collector in self._collectors)

    def find_collectors(self) -> None:
        """Look for running statistics anew where layers' train and eval modes have changed."""
        training = [norm.training for norm in self._norms.values()]
        if training != self._training:
            self._training = training
            self._collectors = [*find_statistics(self._model, self._mode), *self._ruled]
            self._watch = BufferWatch(
                [slot for slot in self._may_not_change if not (is_statistic(slot) and slot.module.training)]
            )

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
            BufferError: it changed a buffer that nobody said how to average, or a layer's mode.
        """
        if [norm.training for norm in self._norms.values()] != self._training:
            self._check_modes(tower)
        self._watch.check(f"tower {tower}")
        parts = [collector.contribution(tower, rows) for collector in self._collectors]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, self._nothing])

    def _check_modes(self, tower: int) -> None:
        thawed = [
            name or "the model"
            for (name, norm), was_training in zip(self._norms.items(), self._training or [], strict=True)
            if norm.training and not was_training and norm.running_mean is not None
        ]
        if thawed:
            raise BufferError(
                f"tower {tower} ran {', '.join(thawed)} in training mode, but the step began in eval mode: "
                "change modes between steps"
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
            BufferError: towers ended with different counters, or a pass changed a buffer unseen until now.
        """
        self._watch.end_step()
        self._counters.finish(towers, counters)
        parts = totals.split([collector.num_values for collector in self._collectors])
        for collector, part in zip(self._collectors, parts, strict=False):
            collector.finish(part, rows)


def _is_counter(slot: Slot) -> bool:
    buffer = slot.get()
    if buffer is None or buffer.numel() != 1:
        return False
    return not buffer.is_floating_point() and not buffer.is_complex()


class Counters:
    """Integer buffers of one element, such as `num_batches_tracked`.

    What travels is by how much a tower counted on, because float64 holds no integers above 2^53. Every tower
    must have counted alike, except for normalisation layers: of those, some towers may not have used one.
    """

    def __init__(self, slots: Sequence[Slot], mode: Mode, job: Job) -> None:
        self._slots = slots
        self._mode = mode
        self._buffers = SharedBuffers(slots)
        self._start = torch.zeros(len(slots), dtype=torch.int64, device=job.device)
        self._are_int64 = all(shared.dtype == torch.int64 for shared in self._buffers.shared)
        self._of_norms = torch.tensor([is_statistic(slot) for slot in slots], dtype=torch.bool)

    def start_step(self) -> None:
        """Note the shared values."""
        self._buffers.start_step()
        self._start = self._flat(self._buffers.shared)

    def start_tower(self) -> None:
        """Put the shared values back."""
        self._buffers.start_tower()

    def put_back(self) -> None:
        """Put the shared values back, in any case."""
        self._buffers.put_back()

    def counted(self) -> Tensor:
        """Return how far the counters are from the shared values, int64 [counters]."""
        return self._flat(self._buffers.values()) - self._start

    def finish(self, towers: Sequence[int], counted: Tensor) -> None:
        """Count on, for a normalisation layer as far as the tower that used it most (or as tower 0).

        Args:
            towers: those that had rows.
            counted: float64 [len(towers), counters].

        Raises:
            BufferError: towers counted differently.
        """
        if not self._slots:
            return
        if counted.device.type == "cpu" and not torch.equal(counted, counted[:1].expand_as(counted)):
            self._check_alike(towers, counted)
        most = counted[0] if self._mode == "first" else counted.amax(dim=0)
        ended = self._start + most.to(torch.int64)
        self._buffers.write([v.view_as(b) for v, b in zip(ended.unbind(), self._buffers.shared, strict=True)])

    def _flat(self, buffers: Sequence[Tensor]) -> Tensor:
        if not buffers:
            return self._start
        if self._are_int64:
            return torch.cat([buffer.reshape(1) for buffer in buffers])
        return torch.cat([buffer.reshape(1).to(torch.int64) for buffer in buffers])

    def _check_alike(self, towers: Sequence[int], counted: Tensor) -> None:
        differ = (counted != counted[:1]) & ~self._of_norms
        if not differ.any():
            return
        tower, column = differ.nonzero()[0].tolist()
        name, values = self._slots[column].name, self._start[column] + counted[:, column].to(torch.int64)
        raise BufferError(
            f"buffer {name} is {int(values[tower])} after tower {towers[tower]}, "
            f"{int(values[0])} after tower {towers[0]}: integer buffers must not depend on rows, unless you "
            f"say whose to keep, as in Towers(..., buffers={{{name!r}: 'first'}})"
        )
