"""A model's buffers through a step: shared at its start, each tower's own during it, then shared again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.errors import BufferError
from samestep.statistics import Mode, Statistics, find_statistics

__all__ = ["Buffers"]


class Buffers:
    """All buffers of a model.

    Running statistics of normalisation layers are averaged or pooled (see `samestep.statistics`), integer
    buffers of one element count on from the shared value in every tower, and no other buffer may change.

    Args:
        model: whose buffers.
        mode: what becomes of running statistics.

    Attributes:
        max_moments: more numbers than a tower ever hands in.
    """

    def __init__(self, model: nn.Module, mode: Mode) -> None:
        self._model = model
        self._mode = mode
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._training: list[bool] = []
        self._collectors: list[Statistics] = []
        self.max_moments = sum(1 + 2 * norm.num_features for norm in self._norms)
        self._counters = Counters(model)
        self._watch = BufferWatch(model)

    @property
    def num_training(self) -> int:
        """How many normalisation layers are in training mode."""
        return sum(self._training)

    @property
    def num_moments(self) -> int:
        """How many numbers a tower hands in, S."""
        return sum(collector.num_values for collector in self._collectors)

    def find_collectors(self) -> None:
        """Look for running statistics anew where layers' train and eval modes have changed."""
        training = [norm.training for norm in self._norms]
        if training != self._training:
            self._training = training
            self._collectors = find_statistics(self._model, self._mode)

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
        """Give all buffers the values from before the step, after its passes."""
        for collector in self._collectors:
            collector.put_back()
        self._counters.put_back()

    def moments(self, tower: int, rows: int) -> Tensor:
        """Return what the tower that just ran hands in, float64 [S].

        Raises:
            BufferError: it changed a buffer that nobody said how to average.
        """
        self._watch.check(tower)
        parts = [collector.contribution(tower, rows) for collector in self._collectors]
        return parts[0] if len(parts) == 1 else torch.cat([*parts, torch.zeros(0, dtype=torch.float64)])

    def counters(self) -> Tensor:
        """Return a copy of the integer buffers of one element."""
        return self._counters.values()

    def finish(self, totals: Tensor, rows: int, towers: Sequence[int], counters: Tensor) -> None:
        """Write the new shared values.

        Args:
            totals: the sum of the towers' moments, float64 [S].
            rows: of the global batch.
            towers: those that had rows.
            counters: what each of them ended with, float64 [len(towers), counters].

        Raises:
            BufferError: towers ended with different counters.
        """
        self._counters.finish(towers, counters)
        parts = totals.split([collector.num_values for collector in self._collectors])
        for collector, part in zip(self._collectors, parts, strict=False):
            collector.finish(part, rows)


class Counters:
    """Integer buffers of one element, such as `num_batches_tracked`: every tower must end alike."""

    def __init__(self, model: nn.Module) -> None:
        self._named = [
            (name, buffer)
            for name, buffer in model.named_buffers()
            if buffer.numel() == 1 and not buffer.is_floating_point() and not buffer.is_complex()
        ]
        self._buffers = [buffer for _, buffer in self._named]
        self._shared = [buffer.clone() for buffer in self._buffers]
        self._none = torch.zeros(0, dtype=torch.int64)
        self._fresh = True

    def __len__(self) -> int:
        return len(self._buffers)

    def start_step(self) -> None:
        """Note the shared values."""
        if self._buffers:
            torch._foreach_copy_(self._shared, self._buffers)
        self._fresh = True

    def start_tower(self) -> None:
        """Put the shared values back."""
        if not self._fresh:
            self.put_back()
        self._fresh = False

    def put_back(self) -> None:
        """Put the shared values back, in any case."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._shared)

    def values(self) -> Tensor:
        """Return a copy of the current values, [len(self)]."""
        return torch.cat([b.reshape(1) for b in self._buffers]) if self._buffers else self._none

    def finish(self, towers: Sequence[int], values: Tensor) -> None:
        """Take over the value that all towers ended with.

        Args:
            towers: those that had rows.
            values: float64 [len(towers), len(self)].

        Raises:
            BufferError: towers ended with different values.
        """
        if not self._buffers:
            return
        if self._buffers[0].device.type == "cpu" and not torch.equal(values, values[:1].expand_as(values)):
            tower, column = (values != values[:1]).nonzero()[0].tolist()
            raise BufferError(
                f"buffer {self._named[column][0]} is {values[tower, column]:g} after tower {towers[tower]}, "
                f"{values[0, column]:g} after tower {towers[0]}: integer buffers must not depend on rows"
            )
        torch._foreach_copy_(
            self._buffers, [v.view_as(b) for v, b in zip(values[0], self._buffers, strict=True)]
        )


@dataclass(frozen=True)
class _Watched:
    name: str
    module: nn.Module
    attribute: str


class BufferWatch:
    """Finds buffers that a pass changed although nobody said how to average them."""

    def __init__(self, model: nn.Module) -> None:
        norms = {id(norm) for norm in model.modules() if isinstance(norm, _NormBase)}
        self._watched = [
            _Watched(f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            if id(module) not in norms
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.numel() != 1 or buffer.is_floating_point() or buffer.is_complex()
        ]
        self._seen: list[tuple[Tensor | None, int]] = []

    def start_step(self) -> None:
        """Note which tensors the buffers are, and their versions."""
        self._seen = [self._state(watched) for watched in self._watched]

    def check(self, tower: int) -> None:
        """Raise if a buffer was written to or replaced since `start_step`.

        Raises:
            BufferError: names the buffers.
        """
        changed = [
            watched.name
            for watched, (tensor, version) in zip(self._watched, self._seen, strict=True)
            if self._state(watched)[0] is not tensor or self._state(watched)[1] != version
        ]
        if changed:
            raise BufferError(
                f"tower {tower} changed {', '.join(changed)}: samestep averages the running statistics of "
                "normalisation layers and does not know what to do with other buffers"
            )

    @staticmethod
    def _state(watched: _Watched) -> tuple[Tensor | None, int]:
        buffer = watched.module._buffers.get(watched.attribute)
        return buffer, -1 if buffer is None or buffer.is_inference() else buffer._version
