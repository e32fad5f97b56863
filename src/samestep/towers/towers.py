"""The tower loop: each tower's rows, streams and statistics; its backward pass; the average of all.

For W = 1 and no random numbers, a step is this program:

    total, count = 0, 0
    for t, rows in enumerate(even_ranges(len(batch), T)):
        total += rows · ∇ loss(model, batch[rows])        # added along the canonical tree
        count += rows
    p.grad = total / count

and every other placement gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.buffers.policies import Policy
from samestep.buffers.statistics import Mode
from samestep.errors import BatchError, ConfigError, UsageError
from samestep.identity import check_same
from samestep.summation.buckets import DEFAULT_BUCKET_BYTES
from samestep.summation.exchange import Exchange
from samestep.summation.placement import Placement, even_ranges
from samestep.summation.scalars import Scalars
from samestep.summation.sparse import stored
from samestep.towers.batch import LocalBatch, cut
from samestep.towers.counts import (
    Count,
    LossSum,
    NamedCounts,
    check_counts,
    count_slices,
    wrong_counts,
)
from samestep.towers.noise import GradientNorms, NoiseScale
from samestep.towers.replica import Replica, Settings, job_alone
from samestep.towers.report import Report, report_of
from samestep.towers.run import LossScale, StepInputs, StepRun, Tower
from samestep.towers.whole_batch import Forward, WholeBatch, WholeLoss
from samestep.workers.agreement import agree
from samestep.workers.collectives import gather_rows
from samestep.workers.job import Job

__all__ = ["Towers"]


class Towers:
    """Averages a model's gradients over T towers, wherever they run.

    Between two steps the model may change: layers frozen, thawed, added, replaced or cast. The next step
    averages what there is then, once all workers have come to the same model.

    Args:
        model: its parameters that require grad get the averaged gradients. All workers start from worker
            0's parameters and buffers.
        num_towers: T, part of the experiment like the batch size.
        job: from `samestep.init`; by default a job of this process alone.
        seed: of all towers' random streams.
        statistics: how batch-norm statistics are combined: "mean", "pooled" or "first"; see
            `samestep.buffers.statistics`.
        buffers: how other buffers that a forward changes are combined: from name pattern to "mean", "first"
            or "ignore"; see `samestep.buffers.policies`.
        bucket_bytes: gradients are sent in buckets of about this many bytes.
        accumulate_dtype: sum gradients in this dtype; by default in each parameter's `grad_dtype`, which is
            torch's attribute for the dtype of `p.grad`, and by default that of the parameter.
        sparse_parameters: parameters that may get sparse gradients. The weights of `nn.Embedding` and
            `nn.EmbeddingBag` with `sparse=True` are found without it. The average is sparse, and coalesced,
            where the gradients of all towers that used the parameter are sparse; otherwise it is dense.
        on_zero_count: what happens where the counts of all towers are 0: "raise" a `BatchError`, or "skip"
            the step, which leaves every `p.grad` None and sets `Report.skipped`. With "skip" and counts
            that are tensors on a GPU, `average` waits for the GPU.
        noise_every: measure the gradient noise scale at every n-th step; 1 is always, 0 never.

    Attributes:
        model: see above.
        job: see above.
        seed: see above.
        noise: the smoothed gradient noise scale.

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
        >>> report.count, model.weight.grad.shape
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
        buffers: Mapping[str, Policy] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        accumulate_dtype: torch.dtype | None = None,
        sparse_parameters: Sequence[nn.Parameter] = (),
        on_zero_count: Literal["raise", "skip"] = "raise",
        noise_every: int = 20,
    ) -> None:
        self._settings = Settings(
            seed, statistics, dict(buffers or {}), bucket_bytes, accumulate_dtype, on_zero_count, noise_every
        )
        self.model = model
        self.job = job if job is not None else job_alone(model)
        self.seed = seed
        self.noise = NoiseScale()
        self._step = 0
        self._set_up(num_towers, sparse_parameters)
        self._run: StepRun | None = None
        self._last: StepRun | None = None
        self._again: StepRun | None = None

    def _set_up(self, num_towers: int, sparse_parameters: Sequence[nn.Parameter]) -> None:
        """Check the model and the settings on every worker, then that they are the same on all."""
        must_match: dict[str, Any] = {"towers": num_towers, **self._settings.must_match}
        error: Exception | None = None
        try:
            self._placement = Placement.even(num_towers, self.job.world_size)
            self._replica = Replica(self.model, self.job, self._settings, sparse_parameters)
            self._plan = self._replica.plan(self._placement)
            must_match |= self._plan.description
        except Exception as found:
            error = found
        agree(self.job, must_match, where="Towers", error=error)
        self._replica.start_from_first_worker()

    @property
    def step(self) -> int:
        """Steps taken so far; while the last one is run once more, those taken before it."""
        return self._step if self._again is None else self._again.inputs.step

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the last step averaged the gradients of, in the model's order."""
        return self._replica.parameters

    @property
    def placement(self) -> Placement:
        """Which towers each worker runs; others may be set between two steps, on all workers alike.

        Raises:
            ConfigError: on setting, it has another number of towers or workers.
            UsageError: on setting, the last step has not been averaged.
        """
        return self._placement

    @placement.setter
    def placement(self, placement: Placement) -> None:
        self._check_averaged()
        if not isinstance(placement, Placement):
            raise ConfigError(
                f"placement = {placement!r}: expected a samestep.Placement, such as Placement.even(8, 2) or "
                "Placement((0, 3, 8))"
            )
        expected = (self._placement.num_towers, self.job.world_size)
        if (placement.num_towers, placement.num_workers) != expected:
            raise ConfigError(
                f"placement has {placement.num_towers} towers on {placement.num_workers} workers: expected "
                f"{expected[0]} on {expected[1]}"
            )
        self._placement = placement

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on: T, the seed, the steps taken and the noise scale."""
        own = {"towers": self._placement.num_towers, "seed": self.seed, "step": self._step}
        return {**own, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, on any placement.

        Raises:
            ConfigError: it is of another number of towers, or of another seed.
            UsageError: a step has begun and has not been averaged.
        """
        self._check_averaged()
        check_same(state, {"towers": self._placement.num_towers, "seed": self.seed}, "towers")
        self._step = int(state["step"])
        self.noise.load_state_dict(state["noise"])

    def __call__(
        self,
        batch: Any,
        *,
        counts: Mapping[str, Count] | None = None,
        scaler: LossScale | None = None,
        flags: Callable[[], int] = int,
    ) -> Iterator[Tower]:
        """Start a step and return this worker's towers that have rows, in order.

        While a tower has its turn, torch's, Python's and NumPy's global generators are seeded from (seed,
        step, tower); afterwards they are what they were.

        Args:
            batch: the global batch, the same on every worker: any nest of tensors, arrays and lists, rows
                first, see docs/batches.md; or a `LocalBatch` from a `TowerLoader`. A tower's rows are copied
                to the worker's device when its turn comes: until the last turn, do not write to the batch.
            counts: for a loss that is a sum of several means, each over something else: what each of them
                counts, by name, as `count(tower_batch)` -> a number or 0-dim tensor. Each tower then hands
                in a mapping with a sum for each name. The gradient is that of the sum over names of all
                towers' sums over all towers' counts; a name that counts 0 adds nothing. The counts
                travel in one small message before the first pass.
            scaler: a `torch.amp.GradScaler` whose scale each loss is multiplied by before backward; the
                average is scaled, the report is not.
            flags: called once a step, just before this worker sends its first message: returns an int
                whose bits are OR-ed over all workers into `Report.flags`, such as a request to stop.

        Raises:
            BatchError: numbers of rows disagree, there are none, something cannot be cut, or nothing counts
                (see `on_zero_count`); in the loop, the batch was written to.
            ConfigError: `counts` is not a mapping of functions, or the model cannot be trained any more.
            DisagreementError: workers came with different batches or models. On a worker that finds out
                while the passes run, the error comes from `Tower.backward` or `average`.
            UsageError: the last step has not been averaged.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> towers = Towers(model, 4)
            >>> batch = {"x": torch.randn(10, 2), "y": torch.tensor([-1.0, 0, 1, 2, 3, 4, 5, 6, 7, 8])}
            >>> counts = {"labels": lambda part: (part["y"] >= 0).sum(), "rows": lambda part: len(part["y"])}
            >>> for tower in towers(batch, counts=counts):
            ...     found = model(tower.batch["x"])[:, 0]
            ...     error = (found - tower.batch["y"]).square() * (tower.batch["y"] >= 0)
            ...     tower.backward({"labels": error.sum(), "rows": 0.01 * found.square().sum()})
            >>> report = towers.average()
            >>> report.loss == sum(report.losses.values()), report.count
            (True, 19.0)
        """
        names = check_counts(counts)
        local, exchange = self._begin(batch, names, flags)
        named = None
        if counts is not None:
            named = self._count(counts, local, exchange)
            if not any(named.totals):
                local = replace(local, slices={})  # nothing counts, so no pass is worth its time
        self._run = self._start(
            StepInputs(self._step, self.seed, local, self._rows(local), named, scaler), exchange
        )
        return self._run.turns()

    def whole_batch(
        self,
        batch: Any,
        forward: Forward,
        loss: WholeLoss,
        *,
        scaler: LossScale | None = None,
        flags: Callable[[], int] = int,
    ) -> None:
        """Run a step whose loss is no sum over rows, instead of the loop over towers; then call `average`.

        Every tower runs forward without grad; the loss is computed on all outputs, alike on every worker;
        then every tower runs forward again, under the same random streams, and the gradient of its outputs
        is pushed through. So the average is the gradient of the whole batch's loss, for the memory of one
        tower's activations and the time of a second forward.

        Args:
            batch: as for `__call__`.
            forward: `forward(tower_batch) -> outputs`, a dense tensor or nested dense tensors, rows first.
                Towers' outputs may differ in their numbers of rows, and in nothing else. It is called twice,
                and must do the same both times.
            loss: `loss(all_outputs, batch) -> scalar`. It gets the outputs with the rows of all towers, in
                tower order: contiguous, in the dtypes that `forward` gave, floating ones requiring grad; and
                a copy of the global batch on the worker's device, or, where the batch is a `LocalBatch`,
                something that raises as soon as it is used. It may use parameters of the model, and draw
                from the global generators, which are seeded from (seed, step).
            scaler: as for `__call__`.
            flags: as for `__call__`.

        Raises:
            BatchError, DisagreementError: as for `__call__`.
            UsageError: the last step has not been averaged; outputs are not nested dense tensors, or differ
                between towers or passes; the loss is not a scalar that requires grad, or uses the batch
                where that is a `LocalBatch`.

        Example:
            >>> model = torch.nn.Linear(2, 3)
            >>> towers = Towers(model, 4)
            >>> spread = lambda outputs, batch: -torch.cdist(outputs, outputs).mean()
            >>> towers.whole_batch(torch.randn(10, 2), model, spread)
            >>> towers.average().count
            1.0
        """
        local, exchange = self._begin(batch, (), flags, is_whole_batch=True)
        whole = WholeBatch(self.model, self.job, forward, loss, seed=self.seed, step=self._step)
        inputs = StepInputs(
            self._step, self.seed, local, self._rows(local), scaler=scaler, is_whole_batch=True
        )
        run: StepRun | None = None
        try:
            whole.run_ahead(local.slices)
            exchange.compare(torch.zeros(len(self._own_towers), 0, dtype=torch.float64))
            value = whole.differentiate(batch, self.parameters, None if scaler is None else scaler.scale)
            run = self._start(inputs, exchange)
            for tower in run.turns():
                # The loss counts once, as tower 0's. Nothing here may hold on to a tower's outputs.
                count = float(tower.index == 0)
                total = LossSum(value, (value * count).reshape(1), count)
                run.add(tower, total, whole.run_again(tower.index, tower.batch))
        except Exception as error:
            if run is not None:
                run.put_back()
            exchange.fail(error)
        self._run = run

    def average(self) -> Report:
        """Finish the step: every worker's `p.grad` becomes the average over all towers.

        A parameter that no tower used keeps `grad = None`.

        Returns:
            The step's report, the same on every worker.

        Raises:
            UsageError: some of this worker's towers have not run.
            DisagreementError, LostWorkerError: from the exchange.
            BatchError: the towers' counts add up to 0 (see `on_zero_count`), or are negative or not finite.
        """
        run = self._run
        if run is None:
            raise UsageError("average() without a batch: loop over towers(batch) first")
        run.check_complete()
        self._run, self._last = None, run
        try:
            found = run.finish()
        except BaseException:
            run.put_back()
            raise
        scalars = run.exchange.scalars
        error = wrong_counts(self._step, run.inputs.names, scalars.counts * run.inputs.unit, run.has_count)
        if error is not None:
            return self._leave_out(run, scalars, error)
        gradients: list[Tensor] = []
        for index, gradient in found:
            if gradient is not None:
                self.parameters[index].grad = own = _as_grad_of(self.parameters[index], gradient)
                gradients.append(stored(own))
        tower_norms = self._measure(run, scalars, [gradient for _, gradient in found])
        num_ran = min(run.inputs.local.rows, self._placement.num_towers)  # those without rows come last
        self._replica.buffers.finish(
            scalars.moments, run.inputs.local.rows, range(num_ran), scalars.counters[:num_ran]
        )
        return self._report(run, scalars, gradients, tower_grad_norms=tower_norms)

    def _begin(
        self, batch: Any, sums: tuple[str, ...], flags: Callable[[], int], *, is_whole_batch: bool = False
    ) -> tuple[LocalBatch, Exchange]:
        """Cut the batch, and agree with the other workers on a new plan, if there is one."""
        self._check_averaged()
        local, plan, error = LocalBatch(0, {}), self._plan, None
        try:
            plan = self._replica.plan(self._placement, sums, is_whole_batch=is_whole_batch)
            is_read_twice = bool(sums) or is_whole_batch
            local = cut(batch, self._placement, self.job, is_read_twice=is_read_twice)
        except Exception as found:
            error = found
        must_match = {"step": self._step, "rows": local.rows, "batch fingerprint": local.fingerprint}
        exchange = Exchange(self.job, self._plan, must_match, flags=flags)
        if error is not None:
            exchange.fail(error)
        if plan.fingerprint != self._plan.fingerprint:
            exchange.change_to(plan)
            self._replica.start_from_first_worker()
        if plan is not self._plan:
            self._plan, exchange = plan, Exchange(self.job, plan, must_match, flags=flags)
        return local, exchange

    def _count(self, counts: Mapping[str, Count], local: LocalBatch, exchange: Exchange) -> NamedCounts:
        """Return what the sums of the loss count in all towers."""
        try:
            own = count_slices(counts, self._own_towers, local.slices, self.job.device)
        except Exception as error:
            exchange.fail(error)
        return NamedCounts(tuple(counts), exchange.compare(own), local.rows)

    def _start(self, inputs: StepInputs, exchange: Exchange) -> StepRun:
        gradients = self._replica.gradient_sum(self._plan)
        gradients.start(exchange, measures=self._is_noise_due and not inputs.is_whole_batch)
        return StepRun(inputs, self.job, self._replica.buffers, self.parameters, gradients, exchange)

    @property
    def _own_towers(self) -> range:
        return self._placement.towers(self.job.rank)

    def _rows(self, local: LocalBatch) -> dict[int, int]:
        rows = self._placement.rows(self.job.rank, local.rows)
        return {tower: len(part) for tower, part in rows.items()}

    def _check_averaged(self) -> None:
        if self._run is not None and self._run.exchange.is_over:  # all workers have raised, and none stepped
            self._run.put_back()
            self._run = None
        if self._run is not None:
            raise UsageError(f"step {self._step} has not been averaged: call average() before the next batch")

    def _leave_out(self, run: StepRun, scalars: Scalars, error: BatchError) -> Report:
        self.put_back_buffers()
        if self._settings.on_zero_count == "skip" and not (scalars.counts != 0).any():
            return self._report(run, scalars, [], skipped=True)
        raise error

    def _report(self, run: StepRun, scalars: Scalars, gradients: Sequence[Tensor], **more: Any) -> Report:
        more |= {"noise_scale": self.noise.value, "flags": run.exchange.flags}
        self._step += 1
        return report_of(run.inputs, scalars, gradients, **more)

    @property
    def _is_noise_due(self) -> bool:
        every = self._settings.noise_every
        return every > 0 and self._step % every == 0 and self._placement.num_towers > 1

    def _measure(
        self, run: StepRun, scalars: Scalars, gradients: Sequence[Tensor | None]
    ) -> list[float] | None:
        """Take the towers' gradients into the noise scale, and return the norm of each one's mean."""
        own = run.squares()
        if own is None:
            return None
        squares = self._gather(own, "norms")
        rows = even_ranges(run.inputs.local.rows, self._placement.num_towers)
        scale = 1.0 if run.inputs.scaler is None else run.inputs.scaler.get_scale()
        norms = GradientNorms.of(squares, scalars.counts, rows, gradients, scale)
        self.noise.measure(norms)
        return norms.of_towers

    def _gather(self, values: Tensor, what: str) -> Tensor:
        sizes = [len(towers) for towers in self._placement.ranges]
        return gather_rows(self.job.transport, values, sizes, f"step {self._step}, {what}")

    def put_back_buffers(self) -> None:
        """Give the model's buffers, such as batch-norm statistics, the values from before the last step."""
        self._replica.buffers.put_back()

    def replay(self) -> Generator[Tower]:
        """Run this worker's towers of the last step once more, for a closer look.

        They get the same rows, random streams and buffers, and the weights as they are now. `backward`
        leaves the gradient of the tower's sum on the parameters. Nothing is kept: afterwards the buffers are
        those of before the step.

        Raises:
            UsageError: there is no step to look at.
        """
        if self._last is None or self._run is not None:
            raise UsageError("replay() needs a step that has been averaged: call average() first")
        inputs = replace(self._last.inputs, scaler=None)
        self._again = StepRun(inputs, self.job, self._replica.buffers, self.parameters, None, None)
        self.put_back_buffers()
        try:
            yield from self._again.turns()
        finally:
            self._again = None
            self.put_back_buffers()

    def gather(self, values: Tensor) -> Tensor:
        """Return a tensor with a row for each tower, [T, ...], from those of every worker's towers.

        Args:
            values: [towers of this worker, ...]; else of the same shape and dtype on all workers, which
                must all call this.
        """
        return self._gather(values, "towers")


def _as_grad_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    wanted = parameter.grad_dtype  # None allows any
    return gradient if wanted is None else gradient.to(wanted)
