r"""Batch-norm statistics: captured from each tower, then averaged or pooled over all of them.

Every tower normalises with its own rows. The running statistics are combined in one of three ways:

- `"mean"`: each tower starts the step from the shared running statistics and updates its own; the
  towers' results are averaged, weighted by rows. A tower that did not use a layer hands in the shared values.
- `"pooled"`: the statistics of all rows together, by the law of total variance,
  :math:`\sigma^2 = \sum_t n_t (\sigma_t^2 + \mu_t^2) / N - \mu^2`, then one update of the shared values.
- `"first"`: tower 0's, as frameworks do that save the first replica.

Everything a tower hands in is a float64 vector; vectors are added along the canonical tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from samestep.buffers.named_buffers import NamedBuffer
from samestep.buffers.shared import AveragedBuffers
from samestep.errors import ConfigError, UsageError

__all__ = ["Mode", "Statistics", "check_norms", "find_statistics", "is_statistic"]

Mode = Literal["mean", "pooled", "first"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics(Protocol):
    """One way to carry running statistics through a step.

    Attributes:
        num_values: how many numbers a tower hands in, S.
    """

    num_values: int

    def start_step(self) -> None:
        """Note the shared values, before the first pass."""

    def start_tower(self) -> None:
        """Put the shared values back, before each pass."""

    def end_passes(self) -> None:
        """Leave the layers as they were found, after the last pass."""

    def put_back(self) -> None:
        """Give the buffers the values from before the step, after `end_passes` and, perhaps, `finish`."""

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return what the tower that just ran hands in: float64 [S]."""

    def finish(self, totals: Tensor, rows: int) -> None:
        """Write the new shared values from the sum over all towers, float64 [S], and the batch's rows."""


def is_statistic(buffer: NamedBuffer) -> bool:
    """Say whether a buffer is a statistic of a normalisation layer, in training mode or not."""
    return isinstance(buffer.module, _NormBase) and buffer.attribute in _STATISTICS


def check_norms(model: nn.Module, mode: Mode) -> None:
    """Check that every tower can have statistics of its own.

    Raises:
        ConfigError: an unknown mode, or a SyncBatchNorm.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"statistics = {mode!r}: expected one of {', '.join(get_args(Mode))}")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, which normalises with the rows of all workers at "
                "once: the bits would depend on the placement, and towers of one worker would not see each "
                "other. Leave out convert_sync_batchnorm, or undo it (layer.__class__ = nn.BatchNorm2d), and "
                "use statistics='pooled'"
            )


def find_statistics(model: nn.Module, mode: Mode) -> list[Statistics]:
    """Return the collectors for the normalisation layers that keep statistics and are in training mode."""
    pooled: list[tuple[str, _NormBase]] = []
    averaged: list[NamedBuffer] = []
    for name, norm in model.named_modules():
        if not (isinstance(norm, _NormBase) and norm.training and norm.running_mean is not None):
            continue
        # An InstanceNorm's statistics are means over instances: averaging by rows is pooling them.
        if mode == "pooled" and isinstance(norm, _BatchNorm):
            pooled.append((name, norm))
        else:
            averaged += [
                NamedBuffer(f"{name}.{each}".removeprefix("."), norm, each) for each in _STATISTICS[:2]
            ]
    collectors: list[Statistics] = []
    if averaged:
        collectors.append(AveragedBuffers(averaged, first_only=mode == "first"))
    if pooled:
        collectors.append(PooledNorms(pooled))
    return collectors


class PooledNorms:
    """Batch-norm layers with pooled statistics: the towers' moments are pooled, for one update a step.

    During the passes each layer runs with momentum 1, so that it leaves its batch's own moments.
    """

    def __init__(self, norms: Sequence[tuple[str, _NormBase]]) -> None:
        self._layers = [_PooledLayer(name, norm) for name, norm in norms]
        self.num_values = sum(layer.num_values for layer in self._layers)

    def start_step(self) -> None:
        for layer in self._layers:
            layer.start_step()

    def start_tower(self) -> None:
        for layer in self._layers:
            layer.start_tower()

    def end_passes(self) -> None:
        for layer in self._layers:
            layer.end_passes()

    def put_back(self) -> None:
        for layer in self._layers:
            layer.put_back()

    def contribution(self, tower: int, rows: int) -> Tensor:
        return torch.cat([layer.contribution() for layer in self._layers])

    def finish(self, totals: Tensor, rows: int) -> None:
        widths = [layer.num_values for layer in self._layers]
        for layer, total in zip(self._layers, totals.split(widths), strict=True):
            layer.finish(total)


class _PooledLayer:
    def __init__(self, name: str, norm: _NormBase) -> None:
        self._name, self._norm = name, norm
        self._mean, self._var = self._current()
        self._shared = (self._mean.clone(), self._var.clone())
        self._momentum = norm.momentum
        self._handle: RemovableHandle | None = None
        self._rows_seen: list[int] = []
        self.num_features = self._mean.numel()
        self.num_values = 1 + 2 * self.num_features

    def _current(self) -> tuple[Tensor, Tensor]:
        assert self._norm.running_mean is not None
        assert self._norm.running_var is not None
        return self._norm.running_mean, self._norm.running_var

    def start_step(self) -> None:
        self._mean, self._var = self._current()
        self._shared[0].copy_(self._mean)
        self._shared[1].copy_(self._var)
        self._momentum, self._norm.momentum = self._norm.momentum, 1.0
        self._handle = self._norm.register_forward_hook(self._see)

    def start_tower(self) -> None:
        self._rows_seen.clear()

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._norm.training and self._norm.track_running_stats:
            self._rows_seen.append(output.numel() // self.num_features)

    def contribution(self) -> Tensor:
        """Return [n, n·d, n·(σ² + d²)] with d = μ − the shared mean, which keeps the squares small."""
        if len(self._rows_seen) > 1:
            raise UsageError(
                f"statistics='pooled': {self._name or 'the model'}, a {type(self._norm).__name__}, ran "
                f"{len(self._rows_seen)} times in one pass, but pooled statistics need exactly one update; "
                "use statistics='mean'"
            )
        if not self._rows_seen:
            return self._mean.new_zeros(self.num_values, dtype=torch.float64)
        count = self._rows_seen[0]
        shift = self._mean.double() - self._shared[0].double()
        biased = self._var.double() * ((count - 1) / count)
        return torch.cat([shift.new_tensor([1.0]), shift, biased + shift.square()]).mul_(count)

    def end_passes(self) -> None:
        self._norm.momentum = self._momentum
        if self._handle is not None:
            self._handle.remove()

    def put_back(self) -> None:
        self._mean.copy_(self._shared[0])
        self._var.copy_(self._shared[1])

    def finish(self, total: Tensor) -> None:
        self.put_back()
        if float(total[0]) == 0:
            return
        count, shift, square = total[0], *total[1:].view(2, -1)
        shift, square = shift / count, square / count
        unbiased = (square - shift.square()) * (count / (count - 1))
        momentum = self._momentum
        if momentum is None:  # PyTorch's cumulative average
            assert self._norm.num_batches_tracked is not None
            momentum = 1.0 / float(self._norm.num_batches_tracked)
        self._mean.copy_(self._shared[0].double() + momentum * shift)
        self._var.copy_((1 - momentum) * self._shared[1].double() + momentum * unbiased)
