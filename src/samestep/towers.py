"""The tower loop: each tower's rows, streams and statistics; its backward pass; the average of all.

For W = 1 and no random numbers, a step is this program:

    total, weight = 0, 0
    for t, rows in enumerate(even_ranges(len(batch), T)):
        total += rows · ∇ loss(model, batch[rows])        # added along the canonical tree
        weight += rows
    p.grad = total / weight

and every other placement gives the same bits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samestep.batch import GlobalBatch, LocalBatch
from samestep.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from samestep.buffers import Buffers
from samestep.contributions import Contributions, TowerFigures
from samestep.errors import BatchError, ConfigError, Error, UsageError
from samestep.exchange import Exchange, Figures, FigureSizes
from samestep.job import Job
from samestep.replicas import agree_on_setup, job_alone, start_from_first_worker
from samestep.report import Report
from samestep.rules import Rule
from samestep.sparse import find_sparse, plan_sparse, stored
from samestep.statistics import Mode
from samestep.streams import GlobalStreams, seed_globals, stream_seed
from samestep.tower import Tower

__all__ = ["LossScale", "Towers"]


class LossScale(Protocol):
    """What `Towers` needs of a gradient scaler."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the loss times the scale."""


class Towers:
    """Averages a model's gradients over T towers, wherever they run.

    Args:
        model: its parameters that require grad get the averaged gradients. All workers start from worker
            0's parameters and buffers.
        num_towers: T, part of the experiment like the batch size.
        job: from `samestep.init`; by default a job of this process alone.
        seed: of all towers' random streams.
        statistics: what becomes of batch-norm statistics; see `samestep.statistics`.
        buffers: what becomes of other buffers that a forward changes: "mean", "first" or "ignore", by
            patterns over their names; see `samestep.rules`.
        bucket_bytes: gradients travel in flat pieces of about this size.
        accumulate_dtype: sum gradients in this dtype; by default in each parameter's own.
        sparse_parameters: whose gradients may be sparse, beside the weights of `nn.Embedding` and
            `nn.EmbeddingBag` with `sparse=True`, which are found. The average is sparse, and coalesced,
            where the gradients of all towers that used the parameter are sparse; otherwise it is dense.

    Attributes:
        placement: which towers each worker runs.
        step: steps taken so far; set it after loading a checkpoint.
        scaler: a gradient scaler whose `scale` is applied to each loss before backward, or None.

    Raises:
        ConfigError: T or W out of range, a model without parameters that require grad, ...
        DisagreementError: workers come with different models or settings.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> towers = Towers(model, 4)
        >>> batch = torch.randn(10, 2)
        >>> for tower in towers(batch):
        ...     tower.backward(model(tower.batch).square().mean())
        >>> report = towers.average()
        >>> report.weight, model.weight.grad.shape
        (10.0, torch.Size([1, 2]))
    """

    def __init__(  # noqa: PLR0913 - the settings of the arithmetic, each with a default
        self,
        model: nn.Module,
        num_towers: int,
        *,
        job: Job | None = None,
        seed: int = 0,
        statistics: Mode = "mean",
        buffers: Mapping[str, Rule] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        accumulate_dtype: torch.dtype | None = None,
        sparse_parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        self.model = model
        self.job = job if job is not None else job_alone(model)
        self.seed = seed
        self.step = 0
        self.scaler: LossScale | None = None
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        settings: dict[str, Any] = {"towers": num_towers, "seed": seed, "statistics": statistics}
        settings["buffers"] = rules = dict(buffers or {})
        settings |= {"bucket_bytes": bucket_bytes, "accumulate_dtype": str(accumulate_dtype)}
        self.placement = agree_on_setup(model, num_towers, self.job, settings, sparse_parameters)
        start_from_first_worker(model, self.job)
        self._dtypes = [accumulate_dtype or p.dtype for p in self.parameters]
        sparse = plan_sparse(named, self._dtypes, find_sparse(model, sparse_parameters))
        apart = [parameter.index for parameter in sparse]
        buckets = plan_buckets(
            self.parameters, self._dtypes, bucket_bytes, self.job.world_size, leave_out=apart
        )
        self._buffers = Buffers(model, statistics, rules, self.job)
        sizes = FigureSizes(2 + len(self._buffers.counters()), self._buffers.max_moments)
        self._exchange = Exchange(self.job, self.placement, named, buckets, sizes, sparse)
        self._open: Contributions | None = None
        self._local = LocalBatch(0, {})
        self._done: set[int] = set()
        if self.job.world_size > 1:
            self._watch_backward()

    def __call__(self, batch: Any) -> Iterator[Tower]:
        """Start a step and return this worker's towers that have rows, in order.

        While a tower has its turn, torch's, Python's and NumPy's global generators are seeded from (seed,
        step, tower); afterwards they are what they were.

        Args:
            batch: the global batch, the same on every worker: any nest of tensors, rows first; or a
                `LocalBatch` from a `TowerLoader`. Tensors are moved to the worker's device.

        Raises:
            BatchError: the tensors' rows disagree, or there are none.
            DisagreementError: workers came with different batches. On a worker that finds out while the
                passes run, the error comes from `Tower.backward` or `average`.
            UsageError: the last step has not been averaged.
        """
        if self._open is not None:
            raise UsageError(f"step {self.step} has not been averaged: call average() before the next batch")
        self._buffers.find_collectors()
        try:
            self._local, facts = self._cut(batch)
        except Error as error:
            self._exchange.begin(self.step, _NO_FACTS, error)
        self._exchange.begin(self.step, facts)
        for parameter in self.parameters:
            parameter.grad = None
        self._done = set()
        towers = self.placement.towers(self.job.rank)
        self._open = Contributions(
            self._exchange, self.parameters, self._dtypes, towers, self.placement.num_towers
        )
        return self._turns()

    def average(self) -> Report:
        """Finish the step: every worker's `p.grad` becomes the average over all towers.

        A parameter that no tower used keeps `grad = None`.

        Raises:
            UsageError: some of this worker's towers have not run, or a parameter got a sparse gradient that
                is not among those where one is expected.
            DisagreementError, LostWorkerError: from the exchange.
            ConfigError: the towers' weights add up to 0.
        """
        contributions = self._open
        if contributions is None:
            raise UsageError("average() without a batch: loop over towers(batch) first")
        missing = [tower for tower in self._local.slices if tower not in self._done]
        if missing:
            raise UsageError(
                f"average() at step {self.step}: {_name(missing)} not run; every tower must run once"
            )
        if not self._local.slices:
            self._send_figures(contributions)
        self._open = None
        contributions.send_rest()
        figures = self._exchange.wait_for_figures()
        self._check_weight(figures)
        gradients = []
        for index, gradient in self._exchange.finish():
            self.parameters[index].grad = _as_grad_of(self.parameters[index], gradient)
            gradients += [stored(gradient)] if gradient is not None else []
        self._finish_buffers(figures)
        self.step += 1
        loss_sums, weights = (figures.scalars[:, :2] * _power_of_two(self._local.rows)).unbind(1)
        return Report(self.step - 1, self._local.rows, loss_sums, weights, gradients)

    # ---- the passes --------------------------------------------------------------------------------

    def _turns(self) -> Iterator[Tower]:
        streams = GlobalStreams.capture(self.job.device)
        self._buffers.start_step()
        rows = self.placement.rows(self.job.rank, self._local.rows)
        try:
            for index, batch in self._local.slices.items():
                self._buffers.start_tower()
                seed_globals(stream_seed(self.seed, "tower", self.step, index), self.job.device)
                tower = Tower(index, batch, len(rows[index]), self._take_in)
                yield tower
                tower.end_turn()
                self._check_turn_used(tower)
        finally:
            self._buffers.end_passes()
            streams.restore()

    def _take_in(self, tower: Tower, loss: Tensor, weight: float | Tensor | None) -> None:
        """Note a tower's figures, then run its backward and take the gradients."""
        contributions = self._open
        assert contributions is not None
        self._check_no_gradients(tower)
        loss = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        unit = _power_of_two(self._local.rows)
        total = loss * ((tower.rows if weight is None else 1) / unit)
        figures = TowerFigures(
            total.detach().reshape(()),
            (tower.rows if weight is None else weight) / unit,
            self._buffers.counters(),
        )
        contributions.add_figures(tower.index, figures, self._buffers.moments(tower.index, tower.rows))
        is_last = tower.index == max(self._local.slices)
        if is_last:
            self._send_figures(contributions)
        contributions.before_backward(tower.index, is_last=is_last)
        (total if self.scaler is None else self.scaler.scale(total)).backward()
        contributions.after_backward(is_last=is_last)
        self._done.add(tower.index)

    def _send_figures(self, contributions: Contributions) -> None:
        """Send the figures of all this worker's towers; those without rows come last, and hand in zeros."""
        zeros = torch.zeros(self._buffers.num_moments, dtype=torch.float64, device=self.job.device)
        nothing = TowerFigures(zeros.new_zeros(()), 0.0, torch.zeros_like(self._buffers.counters()))
        for tower in self.placement.towers(self.job.rank):
            if tower not in self._local.slices:
                contributions.add_figures(tower, nothing, zeros.clone())
        contributions.send_figures()

    def _finish_buffers(self, figures: Figures) -> None:
        ran = range(min(self._local.rows, self.placement.num_towers))  # those without rows come last
        self._buffers.finish(figures.totals, self._local.rows, ran, figures.scalars[: len(ran), 2:])

    # ---- checks ------------------------------------------------------------------------------------

    def _cut(self, batch: Any) -> tuple[LocalBatch, dict[str, int]]:
        """Cut a global batch into this worker's towers, and say what all workers must have alike."""
        if isinstance(batch, LocalBatch):
            local, seen = batch.to(self.job.device), batch.fingerprint
            self._check_slices(local)
        else:
            whole = GlobalBatch.open(batch)
            mine = self.placement.rows(self.job.rank, whole.rows)
            local = LocalBatch(whole.rows, {t: whole.take(mine[t], self.job.device) for t in mine})
            seen = whole.fingerprint() if self.job.world_size > 1 else 0
        if local.rows == 0:
            raise BatchError("the batch has no rows")
        return local, {
            "rows": local.rows,
            "batch fingerprint": seen,
            "norms in training": self._buffers.num_training,
        }

    def _check_slices(self, local: LocalBatch) -> None:
        expected = list(self.placement.rows(self.job.rank, local.rows))
        if list(local.slices) != expected:
            raise BatchError(
                f"the batch holds towers {list(local.slices)}, this worker runs {expected} of "
                f"{self.placement.num_towers}: give the TowerLoader these same towers"
            )

    def _check_no_gradients(self, tower: Tower) -> None:
        if any(parameter.grad is not None for parameter in self.parameters):
            raise UsageError(
                f"{tower!r}: parameters have gradients already; call tower.backward(loss) once instead of "
                "loss.backward(), which goes past the tower"
            )

    def _check_turn_used(self, tower: Tower) -> None:
        if not tower.is_done:
            past = any(parameter.grad is not None for parameter in self.parameters)
            called = "loss.backward() was called past it" if past else "its turn ended without a backward"
            raise UsageError(f"{tower!r}: {called}; call tower.backward(loss) once for every tower")

    def _check_weight(self, figures: Figures) -> None:
        # On a GPU this would wait for the device; there a weight of 0 shows as a gradient that is not finite.
        if self.job.device.type == "cpu" and not 0 < float(figures.weight) < math.inf:
            raise ConfigError(f"step {self.step}: the towers' weights add up to {float(figures.weight):g}")

    def _watch_backward(self) -> None:
        weakly = weakref.ref(self)  # the parameters may outlive this object, and must not keep it alive
        apart = {parameter.index for parameter in self._exchange.sparse}
        for index, parameter in enumerate(self.parameters):
            if index in apart:
                continue

            def ready(_: Tensor, index: int = index) -> None:
                towers = weakly()
                if towers is not None and towers._open is not None:
                    towers._open.gradient_ready(index)

            parameter.register_post_accumulate_grad_hook(ready)


_NO_FACTS = {"rows": 0, "batch fingerprint": 0, "norms in training": 0}


def _power_of_two(rows: int) -> int:
    """Return the largest power of two that is at most `rows`: the unit of sums and weights.

    Scaling by it is exact. It keeps sums of gradients at the size of means, which float16 needs, and
    makes the division at the root one by 1 where the batch is a power of two.
    """
    return 1 << (rows.bit_length() - 1)


def _as_grad_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(parameter.dtype)


def _name(towers: Sequence[int]) -> str:
    verb = "has" if len(towers) == 1 else "have"
    return f"tower{'s' * (len(towers) > 1)} {', '.join(map(str, towers))} {verb}"
