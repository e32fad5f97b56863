"""The result of a step on one worker: its averages, their norms, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from samestep.summation.buckets import Average
from samestep.summation.gradients import like_parameter
from samestep.summation.norms import Norms, gather_norms, squared_sum, total_norm
from samestep.towers.noise import GradientNorms
from samestep.towers.report import Report
from samestep.towers.run import StepRun

__all__ = ["StepResult"]


class StepResult:
    """A step after its exchange.

    Attributes:
        run: the step.
        averaged: the parameters that have an averaged gradient, on this or another worker.
        own_averages: the averages of this worker's shard, which are not in `p.grad`; None unless each worker
            gets only its shard.
    """

    def __init__(self, run: StepRun) -> None:
        self.run = run
        self.averaged: list[nn.Parameter] = []
        self.own_averages: list[Average] | None = None
        self._norms: list[Norms] = []  # of the blocks of each average

    def take(self, averages: Sequence[Average]) -> None:
        """Store the averages in `p.grad`, or in `own_averages` if each worker has a shard; compute norms.

        They are cast to the dtype of `p.grad`. All workers must call this.
        """
        run, plan, parameters = self.run, self.run.plan, self.run.parameters
        taken = [
            each._replace(gradient=like_parameter(each.gradient, parameters[each.parameter]))
            for each in averages
            if each.gradient is not None
        ]
        del averages
        if plan.is_sharded:
            self.own_averages = taken
        else:
            for index, _, gradient in taken:
                parameters[index].grad = gradient
        layouts = zip(parameters, plan.parameters, strict=True)
        dtypes = [parameter.grad_dtype or layout.gradient.dtype for parameter, layout in layouts]
        norms = gather_norms(run.job, plan, taken, dtypes, f"{run.exchange.where}, norms")
        self.averaged = [parameters[index] for index in norms]
        self._norms = [*norms.values()]

    def noise(self) -> GradientNorms | None:
        """Return the norms of the towers' gradients and of the average, if this step measures them."""
        own = self.run.squares()
        if own is None:
            return None
        counts, sums = self.run.exchange.scalars.counts, self.run.gather(own, "norms")
        scale = 1.0 if self.run.scaler is None else self.run.scaler.get_scale()
        squares = torch.where(counts > 0, sums / scale**2 / counts.square(), torch.nan).tolist()
        rows = [len(part) for part in self.run.ranges]
        square = squared_sum([*chain.from_iterable(self._norms)], counts.device)
        return GradientNorms(squares, counts.tolist(), rows, float(square / scale**2))

    def report(self, **more: Any) -> Report:
        """Return the step's report; `more` are attributes of `Report` that `Towers` computes."""
        run = self.run
        loss_sums, counts = run.losses.of_all(run.exchange.scalars)
        if run.plan.is_whole_batch:  # its loss counts once, as tower 0's
            loss_sums, counts = loss_sums[:1], counts[:1]
        more |= {"names": run.plan.sums, "flags": run.exchange.flags}
        return Report(run.step, run.local.rows, loss_sums, counts, self._norm(), **more)

    def _norm(self) -> Tensor:
        norm, scaler = total_norm(self._norms), self.run.scaler
        return norm if scaler is None else norm / scaler.scale(torch.ones_like(norm))
