r"""Batch-norm statistics: computed in each tower, then averaged or pooled over all towers.

Every tower normalises with its own rows. The running statistics are combined in one of three ways:

- `"mean"`: each tower updates the shared running statistics; the results are averaged, weighted by rows. A
  tower that did not use a layer contributes the shared values.
- `"pooled"`: one update of the shared values from the statistics of all rows together, by the law of total
  variance, :math:`\sigma^2 = \sum_t n_t (\sigma_t^2 + \mu_t^2) / N - \mu^2`.
- `"first"`: tower 0's statistics, as in frameworks that save the first replica.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from samestep.buffers.named_tensors import NamedBuffer
from samestep.buffers.shared import AveragedBuffers, SharedBuffers
from samestep.errors import ConfigError, UsageError

__all__ = ["Mode", "PooledNorm", "check_norms", "find_statistics", "is_statistic"]

Mode = Literal["mean", "pooled", "first"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(buffer: NamedBuffer) -> bool:
    """Return whether a buffer is a statistic of a normalisation layer, in training mode or not."""
    return isinstance(buffer.module, _NormBase) and buffer.attribute in _STATISTICS


def check_norms(model: nn.Module, mode: Mode) -> None:
    """Raise for an unknown mode, and for `SyncBatchNorm`, whose statistics depend on the placement."""
    if mode not in get_args(Mode):
        raise ConfigError(f"statistics = {mode!r}: expected one of {', '.join(get_args(Mode))}")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the model'} is a SyncBatchNorm, which normalises with the rows of all workers at "
                "once: the bits would depend on the placement. Leave out convert_sync_batchnorm, or undo it "
                "(layer.__class__ = nn.BatchNorm2d), and use statistics='pooled'"
            )


def find_statistics(model: nn.Module, mode: Mode) -> list[AveragedBuffers | PooledNorm]:
    """Return collectors of the statistics of all layers that are in training mode and have statistics."""
    collectors: list[AveragedBuffers | PooledNorm] = []
    averaged: list[NamedBuffer] = []
    for name, norm in model.named_modules():
        if not (isinstance(norm, _NormBase) and norm.training and norm.running_mean is not None):
            continue
        moments = [NamedBuffer(f"{name}.{each}".removeprefix("."), norm, each) for each in _STATISTICS[:2]]
        # An InstanceNorm's statistics are means over instances, so the mean by rows is the pooled one, too.
        if mode == "pooled" and isinstance(norm, _BatchNorm):
            collectors.append(PooledNorm(name, norm, moments))
        else:
            averaged += moments
    if averaged:
        collectors.append(AveragedBuffers(averaged, first_only=mode == "first"))
    return collectors


class PooledNorm(SharedBuffers):
    """A batch-norm layer with pooled statistics: one update per step from the pooled moments of all towers.

    During the passes the layer has momentum 1, so that its buffers hold the moments of the tower's rows.
    """

    def __init__(self, name: str, norm: _BatchNorm, moments: list[NamedBuffer]) -> None:
        super().__init__(moments)
        self._name, self._norm = name, norm
        self._momentum = norm.momentum
        self._handle: RemovableHandle | None = None
        self._rows_seen: list[int] = []
        self._num_features = self.shared[0].numel()
        self.num_values = 1 + 2 * self._num_features

    def start_step(self) -> None:
        """Record the shared values, set momentum 1, and add a hook that counts rows."""
        super().start_step()
        self._momentum, self._norm.momentum = self._norm.momentum, 1.0
        self._handle = self._norm.register_forward_hook(self._count_rows)

    def start_tower(self) -> None:
        """Reset the row counts; at momentum 1 the previous pass's values have no effect."""
        self._rows_seen.clear()

    def _count_rows(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._norm.training and self._norm.track_running_stats:
            self._rows_seen.append(output.numel() // self._num_features)

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return [n, n·d, n·(σ² + d²)] with d = μ − the shared mean, which keeps the squares small."""
        if len(self._rows_seen) > 1:
            raise UsageError(
                f"statistics='pooled': {self._name or 'the model'}, a {type(self._norm).__name__}, ran "
                f"{len(self._rows_seen)} times in one pass, but pooled statistics need exactly one update; "
                "use statistics='mean'"
            )
        mean, var = self.values()
        if not self._rows_seen:
            return mean.new_zeros(self.num_values, dtype=torch.float64)
        count = self._rows_seen[0]
        shift = mean.double() - self.shared[0].double()
        biased = var.double() * ((count - 1) / count)
        return torch.cat([shift.new_tensor([1.0]), shift, biased + shift.square()]).mul_(count)

    def end_passes(self) -> None:
        """Restore the momentum and remove the hook, after the last pass."""
        self._norm.momentum = self._momentum
        if self._handle is not None:
            self._handle.remove()

    def finish(self, totals: Tensor, rows: int) -> None:
        """Update the shared values with the moments of all rows."""
        if float(totals[0]) == 0:
            self.put_back()
            return
        count, shift, square = totals[0], *totals[1:].view(2, -1)
        shift, square = shift / count, square / count
        unbiased = (square - shift.square()) * (count / (count - 1))
        momentum = self._momentum
        if momentum is None:  # for PyTorch this means a cumulative average
            assert self._norm.num_batches_tracked is not None
            momentum = 1.0 / float(self._norm.num_batches_tracked)
        mean, var = (shared.double() for shared in self.shared)
        self.write([mean + momentum * shift, (1 - momentum) * var + momentum * unbiased])
