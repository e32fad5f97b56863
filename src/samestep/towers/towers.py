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

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.buffers.model_buffers import Buffers
from samestep.buffers.policies import Rule
from samestep.buffers.statistics import Mode
from samestep.errors import BatchError, ConfigError, Error, UsageError
from samestep.identity import check_same
from samestep.summation.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from samestep.summation.exchange import Exchange, Figures, FigureSizes
from samestep.summation.gradient_sum import Contributions, grad_dtype, watch_backward
from samestep.summation.norms import norms_of, squared_sum
from samestep.summation.placement import even_ranges
from samestep.summation.sparse import find_sparse, plan_sparse, stored
from samestep.towers.batch import LocalBatch, cut
from samestep.towers.counts import (
    Count,
    LossSum,
    NamedWeights,
    count_slices,
    names_of,
    nothing_counts,
    wrong_weight,
)
from samestep.towers.noise import GradientNorms, NoiseScale
from samestep.towers.passes import Passes
from samestep.towers.replicas import agree_on_setup, job_alone, start_from_first_worker
from samestep.towers.report import Report
from samestep.towers.run import LossScale, OpenStep
from samestep.towers.tower import Loss, Tower
from samestep.towers.whole_batch import Forward, WholeBatch, WholeLoss
from samestep.workers.job import Job

__all__ = ["Towers"]


class Towers:
    """Averages a model's gradients over T towers, wherever they run.

    Args:
        model: its parameters that require grad get the averaged gradients. All workers start from worker
            0's parameters and buffers.
        num_towers: T, part of the experiment like the batch size.
        job: from `samestep.init`; by default a job of this process alone.
        seed: of all towers' random streams.
        statistics: what becomes of batch-norm statistics; see `samestep.buffers.statistics`.
        buffers: what becomes of other buffers that a forward changes: "mean", "first" or "ignore", by
            patterns over their names; see `samestep.buffers.policies`.
        bucket_bytes: gradients travel in flat pieces of about this size.
        accumulate_dtype: sum gradients in this dtype; by default in each parameter's `grad_dtype`, which is
            torch's attribute for the dtype of `p.grad`, and by default that of the parameter.
        sparse_parameters: whose gradients may be sparse, beside the weights of `nn.Embedding` and
            `nn.EmbeddingBag` with `sparse=True`, which are found. The average is sparse, and coalesced,
            where the gradients of all towers that used the parameter are sparse; otherwise it is dense.
        on_zero_weight: what a batch does in which all towers' weights are 0: "raise" a `BatchError`, or
            "skip" it, which leaves every `p.grad` None and says so in the report. On a GPU, "skip" and
            weights that are tensors there make `average` wait for it.
        noise_every: measure the gradient noise scale at every n-th step; 1 is always, 0 never.

    Attributes:
        placement: which towers each worker runs.
        noise: the smoothed gradient noise scale; part of what a checkpoint carries.
        step: steps taken so far; set it after loading a checkpoint.
        scaler: a gradient scaler whose `scale` is applied to each loss before backward, or None.
        wishes: called once a step, as late as its answer can still travel with the step; the bits that
            any worker answers are in every worker's `Report.wishes`.

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
        on_zero_weight: Literal["raise", "skip"] = "raise",
        noise_every: int = 20,
    ) -> None:
        if on_zero_weight not in ("raise", "skip"):
            raise ConfigError(f"on_zero_weight = {on_zero_weight!r}: expected 'raise' or 'skip'")
        if isinstance(noise_every, bool) or not isinstance(noise_every, int) or noise_every < 0:
            raise ConfigError(f"noise_every = {noise_every!r}: expected an int >= 0; 0 never measures")
        self.model = model
        self.job = job if job is not None else job_alone(model)
        self.seed = seed
        self.step = 0
        self.scaler: LossScale | None = None
        self.noise = NoiseScale()
        self.wishes: Callable[[], int] = int
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        settings: dict[str, Any] = {"towers": num_towers, "seed": seed, "statistics": statistics}
        settings["buffers"] = rules = dict(buffers or {})
        settings |= {"bucket_bytes": bucket_bytes, "accumulate_dtype": str(accumulate_dtype)}
        settings |= {"on_zero_weight": on_zero_weight, "noise_every": noise_every}
        self.placement = agree_on_setup(model, num_towers, self.job, settings, sparse_parameters)
        start_from_first_worker(model, self.job)
        self._skips = on_zero_weight == "skip"
        self._noise_every = noise_every
        self._dtypes = [accumulate_dtype or grad_dtype(p) for p in self.parameters]
        sparse = plan_sparse(named, self._dtypes, find_sparse(model, sparse_parameters))
        apart = [parameter.index for parameter in sparse]
        buckets = plan_buckets(
            self.parameters, self._dtypes, bucket_bytes, self.job.world_size, leave_out=apart
        )
        self._buffers = Buffers(model, statistics, rules, self.job)
        sizes = FigureSizes(len(self._buffers.counters()), self._buffers.max_moments)
        self._exchange = Exchange(self.job, self.placement, named, buckets, sizes, sparse)
        self._open: OpenStep | None = None
        self._last: OpenStep | None = None
        self._passes = Passes(self.job, self.placement, self._buffers, self.parameters)
        if self.job.world_size > 1:
            weakly = weakref.ref(self)  # the parameters may outlive this object, and must not keep it alive
            in_buckets = {n: p for n, p in enumerate(self.parameters) if n not in apart}
            watch_backward(in_buckets, lambda: _contributions(weakly()))

    def __call__(self, batch: Any, *, weights: Mapping[str, Count] | None = None) -> Iterator[Tower]:
        """Start a step and return this worker's towers that have rows, in order.

        While a tower has its turn, torch's, Python's and NumPy's global generators are seeded from (seed,
        step, tower); afterwards they are what they were.

        Args:
            batch: the global batch, the same on every worker: any nest of tensors, rows first; or a
                `LocalBatch` from a `TowerLoader`. Tensors are moved to the worker's device.
            weights: for a loss that is a sum of several means, each over something else: what each of them
                counts, by name, as `count(tower_batch)` -> a number or 0-dim tensor. Each tower then hands
                in a mapping with a sum for each name. The gradient is that of the sum over names of all
                towers' sums over all towers' counts; a name that counts 0 adds nothing. The counts
                travel in one small message before the first pass.

        Raises:
            BatchError: the tensors' rows disagree, there are none, or nothing counts (see `on_zero_weight`).
            ConfigError: `weights` is not a mapping of functions.
            DisagreementError: workers came with different batches. On a worker that finds out while the
                passes run, the error comes from `Tower.backward` or `average`.
            UsageError: the last step has not been averaged.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> towers = Towers(model, 4)
            >>> batch = {"x": torch.randn(10, 2), "y": torch.tensor([-1.0, 0, 1, 2, 3, 4, 5, 6, 7, 8])}
            >>> counts = {"labels": lambda part: (part["y"] >= 0).sum(), "rows": lambda part: len(part["y"])}
            >>> for tower in towers(batch, weights=counts):
            ...     found = model(tower.batch["x"])[:, 0]
            ...     error = (found - tower.batch["y"]).square() * (tower.batch["y"] >= 0)
            ...     tower.backward({"labels": error.sum(), "rows": 0.01 * found.square().sum()})
            >>> report = towers.average()
            >>> report.loss == sum(report.losses.values()), report.weight
            (True, 19.0)
        """
        self._check_averaged()
        names, towers = names_of(weights), self.placement.towers(self.job.rank)
        self._buffers.find_collectors()
        try:
            local = cut(batch, self.placement, self.job)
            counts = count_slices(weights or {}, towers, local.slices, self.job.device)
        except Error as error:
            self._exchange.begin(self.step, self._facts(LocalBatch(0, {})), error, num_counts=len(names))
        self._exchange.begin(self.step, self._facts(local), num_counts=len(names), wishes=self.wishes)
        named = NamedWeights(names, self._exchange.counts(counts), local.rows) if names else None
        if named is not None and not any(named.totals):
            local = replace(local, slices={})  # nothing counts, so no pass is worth its time
        self._open = self._start(local, named)
        return self._open.turns(self.seed, self.step)

    def whole_batch(self, batch: Any, forward: Forward, loss: WholeLoss) -> None:
        """Take the place of the loop over towers, for a loss that is no sum over rows; then call `average`.

        Every tower runs forward without grad; the loss is computed on all outputs, alike on every worker;
        then every tower runs forward again, under the same random streams, and the gradient of its outputs
        is pushed through. So the average is the gradient of the whole batch's loss, for the memory of one
        tower's activations and the time of a second forward.

        Args:
            batch: as for `__call__`.
            forward: `forward(tower_batch) -> outputs`, a tensor or any nest of dense tensors, rows first.
                Towers' outputs may differ in their numbers of rows, and in nothing else. It is called twice,
                and must do the same both times.
            loss: `loss(all_outputs, batch) -> scalar`. It gets the nest with the rows of all towers, in
                tower order: contiguous, in the dtypes that `forward` gave, floating ones requiring grad; and
                a copy of the global batch on the worker's device, or, where the batch is a `LocalBatch`,
                something that raises as soon as it is used. It may use parameters of the model, and draw
                from the global generators, which are seeded from (seed, step).

        Raises:
            BatchError, DisagreementError: as for `__call__`.
            UsageError: the last step has not been averaged, outputs that are no such nest or that differ
                between towers or passes, a loss that is no scalar that requires grad, or one that uses the
                batch where that is a `LocalBatch`.

        Example:
            >>> model = torch.nn.Linear(2, 3)
            >>> towers = Towers(model, 4)
            >>> spread = lambda outputs, batch: -torch.cdist(outputs, outputs).mean()
            >>> towers.whole_batch(torch.randn(10, 2), model, spread)
            >>> towers.average().weight
            1.0
        """
        self._check_averaged()
        self._buffers.find_collectors()
        whole = WholeBatch(self.model, self.job, forward, loss, seed=self.seed, step=self.step)
        local, error = LocalBatch(0, {}), None
        try:
            local = cut(batch, self.placement, self.job)
            whole.run_ahead(local.slices)
        except Exception as found:
            error = found
        facts = self._facts(local)
        whole.gather({"step": self.step, **facts}, error)
        self._exchange.begin(self.step, facts, wishes=self.wishes)
        self._open = step = self._start(local, None, is_whole=True)
        try:
            scale = None if self.scaler is None else self.scaler.scale
            value = whole.differentiate(batch, self.parameters, scale)
            for tower in step.turns(self.seed, self.step):
                # The loss counts once, as tower 0's. Nothing here may hold on to a tower's outputs.
                counts = float(tower.index == 0)
                loss_sum = LossSum(value, (value * counts).reshape(1), counts)
                step.add(tower, loss_sum, whole.run_again(tower.index, tower.batch))
                tower.is_done = True
        except Exception as error:
            self._open = None
            if not self._exchange.has_sent:
                self._exchange.begin(self.step, facts, error)
            raise

    def average(self) -> Report:
        """Finish the step: every worker's `p.grad` becomes the average over all towers.

        A parameter that no tower used keeps `grad = None`.

        Raises:
            UsageError: some of this worker's towers have not run, or a parameter got a sparse gradient that
                is not among those where one is expected.
            DisagreementError, LostWorkerError: from the exchange.
            BatchError: the towers' weights add up to 0 (see `on_zero_weight`), or are negative or not finite.
        """
        step = self._open
        if step is None:
            raise UsageError("average() without a batch: loop over towers(batch) first")
        step.finish(self.step)
        self._open, self._last = None, step
        figures = self._exchange.wait_for_figures()
        error = self._what_is_wrong(step, figures)
        gradients: list[Tensor] = []
        norms: list[Tensor] = []
        for index, gradient in self._exchange.finish():
            if gradient is not None and error is None:
                norms += norms_of(gradient) if step.contributions.measures else []
                self.parameters[index].grad = own = _as_grad_of(self.parameters[index], gradient)
                gradients.append(stored(own))
        if error is not None:
            return self._leave_out(step, figures, error)
        tower_norms = self._measure(step, figures, norms) if step.contributions.measures else None
        ran = range(min(step.local.rows, self.placement.num_towers))  # those without rows come last
        self._buffers.finish(figures.totals, step.local.rows, ran, figures.counters[: len(ran)])
        return self._report(step, figures, gradients, tower_grad_norms=tower_norms)

    def replay(self, look: Callable[[Tower, Tensor], None]) -> Generator[Tower]:
        """Run this worker's towers of the last step once more, for a closer look.

        They get the same rows, random streams and buffers, and the weights as they are now. Nothing is
        kept: afterwards the buffers are those of before the step.

        Args:
            look: is called with each tower and the summed loss that it hands in.

        Raises:
            UsageError: there is no step to look at.
        """
        if self._last is None or self._open is not None:
            raise UsageError("replay() without a step that is over: call average() first")
        step = self._last

        def hand_in(tower: Tower, loss: Loss, weight: float | Tensor | None) -> None:
            look(tower, step.weigh(tower, loss, weight).total)

        self.put_back_buffers()
        self.step -= 1
        try:
            yield from step.replay(self.seed, self.step, hand_in)
        finally:
            self.step += 1
            self.put_back_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return what training needs to continue after this step, on any placement."""
        settings = {"towers": self.placement.num_towers, "seed": self.seed}
        return {**settings, "step": self.step, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ConfigError: it is from a run with another number of towers, or another seed.
        """
        check_same(state, {"towers": self.placement.num_towers, "seed": self.seed}, "towers")
        self.noise.load_state_dict(state["noise"])
        self.step = int(state["step"])

    def put_back_buffers(self) -> None:
        """Give the model's buffers, such as batch-norm statistics, the values from before the last step."""
        self._buffers.put_back()

    def gather(self, values: Tensor) -> Tensor:
        """Return a tensor with a row for each tower, [T, ...], from those of every worker's towers.

        Args:
            values: [towers of this worker, ...]; else of the same shape and dtype on all workers, which
                must all call this.
        """
        return self._exchange.gather(values, "towers")

    def _check_averaged(self) -> None:
        if self._open is not None:
            raise UsageError(f"step {self.step} has not been averaged: call average() before the next batch")

    def _start(self, local: LocalBatch, named: NamedWeights | None, *, is_whole: bool = False) -> OpenStep:
        for parameter in self.parameters:
            parameter.grad = None
        contributions = Contributions(
            self._exchange,
            self.parameters,
            self._dtypes,
            self.placement.towers(self.job.rank),
            self.placement.num_towers,
            measures=self._measures and not is_whole,
        )
        return OpenStep(
            local, named, contributions, self._passes, self._buffers, self.scaler, is_whole=is_whole
        )

    # ---- the end of a step -------------------------------------------------------------------------

    def _what_is_wrong(self, step: OpenStep, figures: Figures) -> BatchError | None:
        """Say what is wrong with the weights, alike on every worker."""
        if self.job.device.type == "cpu":  # a GPU would be waited for; there the average is not finite
            found = wrong_weight(self.step, figures.weights * step.unit)
            if found is not None:
                return found
        # Nor is one waited for where a weight here is known to be above 0. If all are 0, none is, and all
        # workers look; if not, it does not matter who looks.
        if step.is_known_to_count or float(figures.weight) != 0:
            return None
        return nothing_counts(self.step, step.names)

    def _report(self, step: OpenStep, figures: Figures, gradients: Sequence[Tensor], **more: Any) -> Report:
        told = 1 if step.is_whole else self.placement.num_towers  # the loss of a whole batch is tower 0's
        weights = figures.weights[:told, None] * step.unit
        if step.named is not None:
            weights = step.named.counts.to(weights.device)
        self.step += 1
        values = (self.step - 1, step.local.rows, figures.loss_sums[:told] * step.unit, weights, gradients)
        told_too = {"noise_scale": self.noise.value, "wishes": figures.wishes, **more}
        return Report(*values, names=step.names, **told_too)

    def _leave_out(self, step: OpenStep, figures: Figures, error: BatchError) -> Report:
        self.put_back_buffers()
        if self._skips and not (figures.weights != 0).any():
            return self._report(step, figures, [], skipped=True)
        raise error

    @property
    def _measures(self) -> bool:
        is_due = self._noise_every > 0 and self.step % self._noise_every == 0
        return is_due and self.placement.num_towers > 1

    def _measure(self, step: OpenStep, figures: Figures, norms: Sequence[Tensor]) -> list[float]:
        """Take the towers' gradients into the noise scale, and return the norm of each one's mean."""
        squares = self._exchange.gather(step.contributions.squares(), "norms")
        average = squared_sum(norms, self.job.device)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        rows = [len(part) for part in even_ranges(step.local.rows, self.placement.num_towers)]
        found = GradientNorms.of(squares / scale**2, figures.weights, rows, average / scale**2)
        self.noise.measure(found)
        return found.of_towers

    def _facts(self, local: LocalBatch) -> dict[str, int]:
        """Return what all workers must have alike."""
        return {
            "rows": local.rows,
            "batch fingerprint": local.fingerprint,
            "norms in training": self._buffers.num_training,
        }


def _as_grad_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    wanted = parameter.grad_dtype  # None allows any
    return gradient if wanted is None else gradient.to(wanted)


def _contributions(towers: Towers | None) -> Contributions | None:
    return None if towers is None or towers._open is None else towers._open.contributions
