"""The small numbers that every worker gets from all towers: counts, loss sums, counters and moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from samestep.summation.gradients import add_partial_sums
from samestep.summation.plan import Plan
from samestep.summation.tree import TreeSum
from samestep.workers.job import Job

__all__ = ["ScalarExchange", "Scalars", "TowerScalars"]


@dataclass(frozen=True)
class TowerScalars:
    """The scalars of one tower."""

    count: float | Tensor  # gradients are divided by the sum of all towers' counts
    loss_sums: Tensor  # [K]
    counters: Tensor  # [C]
    moments: Tensor  # float64 [S]


@dataclass(frozen=True)
class Scalars:
    """The scalars of all towers, float64."""

    counts: Tensor  # [T]
    loss_sums: Tensor  # [T, K]
    counters: Tensor  # [T, C]
    moments: Tensor  # [S], added along the canonical tree

    @cached_property
    def divisor(self) -> Tensor:
        """The sum of the counts; 1 if that is 0, as a flag divided by 0 marks a parameter as used."""
        count = self.counts.sum()
        return torch.where(count == 0, 1, count)


class ScalarExchange:
    """The scalars of all workers' towers in tensors, which are sent with the first bucket."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job = job
        self._plan = plan
        like = torch.empty(0, dtype=torch.float64, device=job.device)
        width = 1 + plan.num_sums + plan.buffers.num_counters
        self._tables = [like.new_zeros(len(towers), width) for towers in plan.placement.ranges]
        self._moments = [like.new_zeros(len(spans), plan.buffers.num_moments) for spans in plan.spans]

    def put(self, towers: Sequence[TowerScalars]) -> None:
        """Set the scalars of this worker's towers, in order."""
        rank = self._job.rank
        self._tables[rank] = _table(towers, self._tables[rank])
        moments: TreeSum[Tensor] = TreeSum(self._plan.placement.num_towers, add=Tensor.add_)
        moments.push_leaves(self._plan.placement.towers(rank), [each.moments for each in towers])
        self._moments[rank] = torch.stack([total for _, total in moments.nodes])

    def of(self, worker: int) -> list[Tensor]:
        """Return the tensors of a worker: to send if it is this worker, to receive if it is another."""
        return [self._tables[worker], self._moments[worker]]

    def result(self) -> Scalars:
        """Return the scalars of all towers, once those of all workers have arrived."""
        sizes = [1, self._plan.num_sums, self._plan.buffers.num_counters]
        counts, loss_sums, counters = torch.cat(self._tables).split(sizes, dim=1)
        moments = [list(rows) for rows in self._moments]
        total = add_partial_sums(self._plan.spans, moments, self._job.rank)
        return Scalars(counts[:, 0], loss_sums, counters, total)


def _table(towers: Sequence[TowerScalars], like: Tensor) -> Tensor:
    """Return float64 [towers, 1 + K + C], one row per tower, with as few kernels as possible."""
    counts = [each.count for each in towers]
    if any(isinstance(count, Tensor) for count in counts):
        column = torch.stack(
            [torch.as_tensor(c, device=like.device).detach().reshape(()).to(like) for c in counts]
        )
    else:
        column = torch.tensor(counts, dtype=like.dtype, device=like.device)
    loss_sums = torch.stack([each.loss_sums for each in towers]).to(like)
    counters = torch.stack([each.counters for each in towers]).to(like)
    return torch.cat([column[:, None], loss_sums, counters], dim=1)
