"""The loop over towers: each tower's rows, random streams and backward, then the average over all.

For W = 1 and no random numbers, a step is this program:

    total, count = 0, 0
    for t, rows in enumerate(even_ranges(len(batch), T)):
        total += rows · ∇ loss(model, batch[rows])        # added along the canonical tree
        count += rows
    p.grad = total / count

and every other placement gives the same bits.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from samestep.arguments import check_callable, check_kind
from samestep.batches.batch import LocalBatch
from samestep.buffers.policies import Policy
from samestep.buffers.statistics import Mode
from samestep.errors import AbandonedError, DisagreementError, Error, UsageError, one_line, shown, warn
from samestep.identity import check_same, compare, fingerprint
from samestep.summation.buckets import DEFAULT_BUCKET_BYTES
from samestep.summation.placement import Placement
from samestep.summation.plan import Plan
from samestep.towers.counts import Count, check_counts
from samestep.towers.gathering import Values, gather_values
from samestep.towers.noise import NoiseScale
from samestep.towers.opening import Opening, StepOptions
from samestep.towers.placing import Placed, Placing
from samestep.towers.replica import Kind, Replica, Settings, job_alone
from samestep.towers.report import Report
from samestep.towers.result import StepResult
from samestep.towers.root import Also, added_to, together
from samestep.towers.run import StepRun
from samestep.towers.slices import NumRows, in_steps
from samestep.towers.tower import Tower
from samestep.towers.whole_batch import Forward, WholeLoss, run_whole_batch
from samestep.watching.model.model_settings import ModelSettings, Resumed, settings_of
from samestep.watching.must_match import of_weights
from samestep.workers.agreement import agree
from samestep.workers.job import Job
from samestep.workers.process import keep_freed_memory

__all__ = ["Towers"]


class Towers:
    """Averages a model's gradients over T towers, whichever workers run them.

    Between two steps the model may change: layers may be frozen, unfrozen, added, replaced or cast, the same
    on all workers. The next step averages the gradients of the changed model.

    Args:
        model: the model; averaged gradients go to its parameters that require grad. All workers start from
            worker 0's parameters and buffers.
        num_towers: T, part of the experiment like the batch size.
        job: the job, from `samestep.init`; by default a job of this process alone.
        seed: seed of all towers' random streams.
        statistics: how batch-norm statistics are combined: "mean" over the towers, "pooled" over all rows,
            or tower 0's, "first"; see docs/statistics.md.
        buffers: how other buffers that a forward changes are combined, by name pattern: "mean",
            "first" or "ignore"; see docs/statistics.md.
        bucket_bytes: gradients are sent in buckets of about this many bytes.
        accumulate_dtype: sum gradients in this dtype; by default in each parameter's `grad_dtype`, torch's
            attribute for the dtype of `p.grad`.
        sparse_parameters: parameters that may get sparse gradients; weights of `nn.Embedding` and
            `nn.EmbeddingBag` with `sparse=True` need not be listed. The average is sparse, and coalesced, if
            the gradients of all towers that used the parameter are sparse.
        on_zero_count: if the counts of all towers are 0, "raise" a `BatchError`, or "skip" the step, which
            leaves every `p.grad` None. With "skip", `average` waits for counts that are tensors on a GPU.
        noise_every: measure the gradient noise scale at every n-th step; 1 is always, 0 never.
        placement: which towers each worker runs: "even", a `Placement`, or "auto", which starts evenly and
            moves towers to faster workers. It does not change the bits; see docs/clusters.md.
        also: one or several modules, such as a loss head, or parameters, such as a temperature, that are
            trained but not part of the model. Their gradients are averaged, too, and their buffers shared.

    Attributes:
        noise: the smoothed gradient noise scale.

    Raises:
        ConfigError: T or W out of range, a model without parameters that require grad, ...
        DisagreementError: the workers have different models or settings.

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

    _last: StepResult  # of the last averaged step

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
        placement: Placed = "even",
        also: Also | None = None,
    ) -> None:
        if job is not None:
            check_kind("job", job, Job, "the job that samestep.init returned")
        check_kind("buffers", buffers, (Mapping, NoneType), "a mapping from name patterns to policies")
        self._settings = Settings(
            seed, statistics, dict(buffers or {}), bucket_bytes, accumulate_dtype, on_zero_count, noise_every
        )
        self._model = model
        self._job = job if job is not None else job_alone(model)
        self.noise = NoiseScale()
        if self.job.device.type == "cpu":
            keep_freed_memory()
        self._step = 0
        self._num_own_batches = 0  # steps with batches that are no loader's
        self._run: StepRun | None = None
        self._placing = Placing(self.job)
        self._asked = shown(placement)
        self._resumed: Resumed | None = None
        self._may_change_workers = False  # between making a batch and taking its step
        self._agree(num_towers, partial(self._make_replica, placement, also, sparse_parameters))
        self._opening.plan = self._opening.send_new_tensors(self._opening.plan)

    def _make_replica(
        self, placement: Placed, also: Also | None, sparse_parameters: Sequence[nn.Parameter]
    ) -> Mapping[str, Any]:
        """Place the towers as asked, and look at the model; return what other workers must have, too."""
        # A newcomer is alone until it joins the others, so a placement for several workers does not fit.
        if placement == "auto" or not self.job.is_newcomer:
            self.placement = placement
        self._root = together(self._model, also)
        self._replica = Replica(self._root, self.job, self._settings, sparse_parameters)
        return {"the layer": self._replica.watch.numbers.settings()}

    def _agree(
        self,
        num_towers: int,
        prepare: Callable[[], Mapping[str, Any] | None],
        *,
        has_regrouped: bool = False,
    ) -> None:
        """Place the towers evenly, make the plan, and compare it and the settings with the other workers'.

        After a regroup, workers may be a call apart, so their models may be frozen, changed or in eval mode
        for it, or not yet. So they agree on a plan of no parameters, and the next step on its own.
        """
        # Every worker checks its arguments before the first message, so that none waits for one that raised.
        must_match: dict[str, Any] = {"towers": num_towers, **self._settings.must_match}
        error: Exception | None = None
        try:
            self._placing.begin(num_towers)
            of_model = prepare() or {}
            asked = Kind(self.placement)
            plan = Plan.of(self.placement, ()) if has_regrouped else self._replica.plan(asked)
            self._opening = Opening(self._replica, plan, has_regrouped=has_regrouped)
            must_match |= {**self._opening.plan.description, "placement": self._asked, **of_model}
        except Exception as found:
            error = found
        mine = fingerprint(self.job.device)
        errors, differences = compare(agree(self.job, must_match, where="Towers", error=error, message=mine))
        if errors:
            raise DisagreementError(f"Towers: {errors[0]}")
        self._bits_must_match = not differences
        if differences and self.job.is_first:
            warn(f"{differences[0]}: the result may depend on which worker runs which towers")

    def _leave_behind(self) -> None:
        """Drop the open step, in which a worker was lost; the others notice the loss themselves."""
        run, self._run, self._opening.exchange = self._run, None, None
        if run is not None:
            run.drop()

    def _come_to(self, what: str) -> None:
        """Check that all workers have reached the call `what`; raise on all if another one is in a step."""
        self._opening.come_to(what, self._step)

    def _agree_again(self) -> None:
        """Agree on settings and plan with the job's current workers, all of which are at the same step."""
        if hasattr(self, "_last"):
            del self._last  # what the towers of lost workers have kept cannot be gathered any more
        self._agree(self.placement.num_towers, self._replica.forget_plans, has_regrouped=True)

    def _check_weights(self, where: str, beside: Mapping[str, nn.Module]) -> None:
        """Check that all workers have the same weights, where no step follows to check them.

        `beside` are modules, by name, of which it checks these, too.
        """
        if self.job.world_size > 1:
            agree(self.job, of_weights(self._replica.hashes(beside)), where=where)

    def _settings_of_model(self) -> ModelSettings | None:
        """Return the model's settings in the last step, for a checkpoint; None before the first step."""
        if self._resumed is not None:
            return self._resumed.saved
        return settings_of(self._root, self._replica.watch.modes.last()) if self._step else None

    def _expect(self, settings: ModelSettings | None) -> None:
        """Let the next step compare the model's settings with those of a checkpoint."""
        at_load = settings_of(self._root, {})
        self._resumed = None if settings is None else Resumed(settings, at_load)

    def _added(self) -> nn.Module | None:
        """Return a module that holds what `also` adds to the model, as its attribute `also`."""
        return added_to(self._model, self._root)

    # Read-only: changing the model, job or seed would have no effect on later steps.

    @property
    def model(self) -> nn.Module:
        """The model that was passed in."""
        return self._model

    @property
    def job(self) -> Job:
        """The job whose workers run the towers."""
        return self._job

    @property
    def seed(self) -> int:
        """The seed of all towers' random streams."""
        return self._settings.seed

    @property
    def num_towers(self) -> int:
        """T."""
        return self.placement.num_towers

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self._step

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "Towers cannot be copied or pickled: save state_dict(), and create new Towers for the copied "
            "model"
        )

    @property
    def placement(self) -> Placement:
        """Which towers each worker runs.

        Between two steps it can be set, to the same value on all workers: a `Placement`; "even"; or "auto",
        which starts from the current placement and follows the workers' speed.
        """
        return self._placing.current

    @placement.setter
    def placement(self, placement: Placed) -> None:
        self._check_no_step("set placement")
        self._placing.set(placement)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that continuing a run needs: T, the seed, the steps taken and the noise scale."""
        own = {"towers": self.placement.num_towers, "seed": self.seed, "step": self._step}
        return {**own, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on any placement.

        Raises:
            ConfigError: the state is for another number of towers or another seed.
        """
        self._check_no_step("load a state")
        check_same(state, {"towers": self.placement.num_towers, "seed": self.seed}, "towers")
        self._step = int(state["step"])
        self.noise.load_state_dict(state["noise"])

    def __call__(
        self,
        batch: Any,
        *,
        counts: Mapping[str, Count] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        flags: Callable[[], int] = int,
        must_match: Mapping[str, Any] | None = None,
    ) -> Iterator[Tower]:
        """Start a step and return this worker's towers that have rows, in order.

        During a tower's turn, torch's, Python's and NumPy's global generators are seeded from (seed, step,
        tower); after the loop they are restored. A step that is still open is abandoned first.

        Args:
            batch: the global batch, the same on every worker: any nest of tensors, arrays and lists, rows
                first, see docs/batches.md; or a `LocalBatch` from a `TowerLoader`. Each tower's rows are
                copied to the device at its turn, so do not write to the batch before the last turn.
            counts: for a loss that is a sum of several means with different denominators: for each name, a
                function `count(tower_batch)` that returns the tower's part of the denominator, a number or
                0-dim tensor. `Tower.backward` then takes a mapping with a sum for each name. The loss is the
                sum over names of (all towers' sums / all towers' counts); a name whose count is 0 adds
                nothing. A function may depend only on the tower's rows, its random streams and the weights.
            scaler: multiplies each loss by its scale before backward; the average is scaled, the report not.
            flags: called once per step, just before this worker sends its first message; returns an int, such
                as a request to stop. `Report.flags` is the OR of all workers' flags.
            must_match: more values that must be the same on all workers, by name, such as the learning rate;
                they are compared by `repr`, in the first message.

        Raises:
            BatchError: numbers of rows disagree, there are no rows, something cannot be cut, or a count is
                negative or not finite; in the loop, the batch was written to.
            ConfigError: `counts` is not a mapping of functions, or the model can no longer be trained.
            DisagreementError: workers have different batches or models; once passes have begun,
                `Tower.backward` or `average` raises it.
            UsageError: the last step was interrupted in an exchange, or a hook on a parameter would see sums
                over towers.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> towers = Towers(model, 4)
            >>> counts = {"positive": lambda part: (part > 0).any(1).sum(), "rows": len}
            >>> for tower in towers(torch.tensor([[1.0, 2.0], [-1.0, 1.0], [-1.0, -2.0]]), counts=counts):
            ...     found, has_positive = model(tower.batch)[:, 0], (tower.batch > 0).any(1)
            ...     tower.backward({"positive": found[has_positive].sum(), "rows": found.square().sum()})
            >>> report = towers.average()
            >>> report.loss == sum(report.losses.values()), report.count
            (True, 5.0)
        """
        return self._loop(batch, counts, StepOptions(scaler, flags, must_match))

    def _loop(self, batch: Any, counts: Mapping[str, Count] | None, options: StepOptions) -> Iterator[Tower]:
        """Start a step whose loss is a sum over rows; see `__call__`."""
        self._run = run = self._begin(batch, options, sums=check_counts(counts))
        if counts is not None:
            with self._ending_on_error(run):
                run.count(counts)
        return run.turns()

    def whole_batch(
        self,
        batch: Any,
        forward: Forward,
        loss: WholeLoss,
        *,
        scaler: torch.amp.GradScaler | None = None,
        flags: Callable[[], int] = int,
        must_match: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a step whose loss is not a sum over rows, instead of the loop over towers; then call `average`.

        Every tower runs forward without grad. Every worker computes the same loss on the outputs of all
        towers. Then every tower runs forward again, with the same random numbers, and backward from the
        gradient of its outputs. This is the gradient of the whole batch's loss, but only one tower's
        activations are in memory at a time.

        Args:
            batch: as for `__call__`.
            forward: `forward(tower_batch) -> outputs`, a dense tensor or nested dense tensors, rows first.
                Outputs of different towers may differ only in the number of rows. It is called twice, and
                must do the same both times.
            loss: `loss(all_outputs, batch) -> scalar`. `all_outputs` has the rows of all towers, in tower
                order: contiguous, in the dtypes that `forward` returned; floating-point tensors require grad.
                `batch` is a copy of the global batch on the worker's device; if the batch is a `LocalBatch`,
                it is an object that raises on any use. The loss may use parameters of the model, and draw
                from the global generators, which are seeded from (seed, step).
            scaler: as for `__call__`.
            flags: as for `__call__`.
            must_match: as for `__call__`.

        Raises:
            BatchError, DisagreementError: as for `__call__`.
            UsageError: as for `__call__`, or `forward` or `loss` returned something other than the above.

        Example:
            >>> model = torch.nn.Linear(2, 3)
            >>> towers = Towers(model, 4)
            >>> spread = lambda outputs, batch: -torch.cdist(outputs, outputs).mean()
            >>> towers.whole_batch(torch.randn(10, 2), model, spread)
            >>> towers.average().count
            1.0
        """
        check_callable("forward", forward, "a function of a tower's batch")
        check_callable("loss", loss, "a function of all outputs and the batch")
        options = StepOptions(scaler, flags, must_match, pass_function=forward)
        self._run_whole_batch(batch, forward, loss, options)

    def _run_whole_batch(self, batch: Any, forward: Forward, loss: WholeLoss, options: StepOptions) -> None:
        """Run a step whose loss is not a sum over rows; see `whole_batch`."""
        self._run = run = self._begin(batch, options, is_whole_batch=True)
        with self._ending_on_error(run):
            run_whole_batch(run, self._root, batch, forward, loss, compares_loss=self._bits_must_match)

    def slices(self, batches: Iterable[Any], *, rows: NumRows = None) -> Iterator[LocalBatch]:
        """Group T small batches into one batch, one for each tower: for loops that accumulate gradients.

        The gradient is that of the mean over the rows of all T, whatever their sizes. If the iterator ends
        in the middle of a step, the last step has the remaining small batches.

        Every worker iterates over all small batches, which must be the same on all workers, counts their
        rows, and keeps copies of its towers' batches until the end of the step; within a `samestep.Elastic`
        that may lose workers, copies of all T. To resume a run, skip `towers.step * T` small batches.

        Args:
            batches: an iterable of small batches; each a nest as for `__call__`, or, with `rows`, anything.
            rows: the number of rows of a small batch, at least 1: an int, or a function `rows(small_batch)`;
                by default the rows are counted.

        Raises:
            ConfigError: `rows` is something else.
            BatchError: in the loop, the rows cannot be counted, there are none, or `rows` is wrong.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> towers = Towers(model, 2)
            >>> for batch in towers.slices(torch.randn(10, 2).split(4)):
            ...     for tower in towers(batch):
            ...         tower.backward(model(tower.batch).square().mean())
            ...     print(towers.average().rows)
            8
            2
        """
        return in_steps(batches, self, rows)

    def average(self) -> Report:
        """Finish the step: set `p.grad` on every worker to the average over all towers.

        A parameter that no tower used keeps `grad = None`.

        Raises:
            UsageError: some of this worker's towers have not run.
            DisagreementError, LostWorkerError: workers differ, or one failed or was lost.
            BatchError: the towers' counts add up to 0 (see `on_zero_count`), or are negative or not finite.
        """
        if torch.is_inference_mode_enabled():  # clipping could not write to gradients that are made in it
            with torch.inference_mode(False):
                return self.average()
        run = self._run
        if run is None:
            raise UsageError("average() without a batch: loop over towers(batch) first")
        with self._ending_on_error(run):
            run.check_complete()
            averages = run.finish()
            run.check_beside(bits_must_match=self._bits_must_match)
        self._last = result = StepResult(run)
        error = run.wrong_counts()
        if error is not None:
            self._run = None
            run.put_back()
            if self._settings.on_zero_count == "raise" or (run.exchange.scalars.counts != 0).any():
                raise error
            return self._report(result, skipped=True)
        with self._ending_on_error(run):
            result.take(averages)
            del averages
            self._replica.dropped.note_average(run.parameters)
            measured = result.noise()
            run.update_buffers()
        if self._resumed is not None and self.job.is_first:
            self._resumed.compare(self._root, run.watch.modes.last(), f"step {self._step}")
        self._resumed = None
        if measured is not None:
            self.noise.measure(measured)
        self._run = None
        return self._report(result, tower_grad_norms=None if measured is None else measured.of_towers)

    def gather(self, values: Values) -> list[Any]:
        """Return what all towers of the last step have kept, in order, on every worker.

        A worker has only the outputs of its own towers, and how many these are depends on the placement. A
        running mean, a queue or an accuracy that is computed from all towers' values, in their order, has the
        same bits for any number of workers. All workers must call this, after `average`.

        Args:
            values: what each tower has kept that has run on this worker, in a dict by `tower.index`, or in
                order in a list, as the loss function of a `Step` may append it: tensors, or anything that
                can be pickled.

        Returns:
            copies, one for each tower that has rows; tensors are on this worker's device if they were on a
            GPU.

        Raises:
            UsageError: on all workers, if `values` on one are not those of its towers, or cannot be pickled.
                On this one, if no step has been taken, one is open, or workers were lost or joined since.

        Example:
            >>> model, kept = torch.nn.Linear(2, 1), {}
            >>> towers = Towers(model, 2)
            >>> for tower in towers(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])):
            ...     kept[tower.index] = tower.batch.mean(0)
            ...     tower.backward(model(tower.batch).mean())
            >>> _ = towers.average()
            >>> towers.gather(kept)
            [tensor([2., 3.]), tensor([5., 6.])]
        """
        self._check_no_step("gather")
        if not hasattr(self, "_last"):
            raise UsageError(
                "gather() without a step: call it after average(), and in an Elastic in the same call, as "
                "a worker that is lost takes what its towers have kept along"
            )
        run = self._last.run
        return gather_values(self.job, values, [*run.local.slices], f"{run.exchange.where}, gather()")

    def abandon(self) -> None:
        """Undo the step that has begun, instead of `average`, after an exception or Ctrl-C.

        Buffers and random generators are restored, the step's number does not change, and every `p.grad` is
        None. On all other workers `average` raises `AbandonedError`. All workers may then begin the step
        again. Without an open step, do nothing.

        Raises:
            UsageError: an exchange was interrupted, so other workers may have taken the step already, or may
                wait for messages that do not come.
        """
        run = self._run
        exchange = self._opening.exchange if run is None else run.exchange
        if exchange is not None and exchange.is_committed:
            self.job.transport.give_up(exchange.where)
            raise UsageError(
                f"step {self._step} was interrupted during an exchange, and other workers may have completed "
                "it: end this process, and continue from a checkpoint"
            )
        self._opening.exchange = None
        if run is None:
            return
        cause = sys.exception()
        name = one_line(f"{type(cause).__name__}: {cause}").removesuffix(":")
        reason = "" if cause is None else f" after {name}"
        with contextlib.suppress(AbandonedError, DisagreementError):
            self._leave(run, AbandonedError(reason))

    def _leave(self, run: StepRun, error: Error) -> NoReturn:
        """Drop a step and send its error to the other workers; if interrupted, the step stays open."""
        run.drop()
        try:
            run.exchange.fail(error)
        except Exception as raised:
            if raised is error:
                self._run = None
            raise

    @contextlib.contextmanager
    def _ending_on_error(self, run: StepRun) -> Iterator[None]:
        """End the step if the block raises; an interrupt leaves it open."""
        try:
            yield
        except Error as error:
            self._leave(run, error)
        except Exception:
            if not run.exchange.is_committed:
                self.abandon()
            raise

    def _report(self, result: StepResult, **more: Any) -> Report:
        self._step += 1
        if result.run.local.used is None:
            self._num_own_batches += 1
        else:
            result.run.local.used()
        self._placing.follow(result.run)
        return result.report(noise_scale=self.noise.value, **more)

    def _begin(
        self, batch: Any, options: StepOptions, *, sums: tuple[str, ...] = (), is_whole_batch: bool = False
    ) -> StepRun:
        """Begin a step, after the last one has ended."""
        if self._run is not None and self._run.is_complete and self.job.is_first:
            warn(
                f"step {self._step} is abandoned, although all its towers have run: call average() after "
                "every batch; to accumulate gradients, pass one larger batch, with more towers"
            )
        self.abandon()
        if self.job.is_closed:
            raise UsageError(f"step {self._step}: the job was closed: expected job.close() as the last call")
        if self.placement.num_workers != self.job.world_size:
            raise UsageError(
                f"step {self._step}: these Towers are for {self.placement.num_workers} workers, and the job "
                f"has {self.job.world_size} now: pass them to samestep.Elastic, too"
            )
        kind = Kind(self.placement, sums, is_whole_batch, options.division)
        return self._opening.open(self._step, batch, kind, options, self._placing.pass_ns)

    def _check_no_step(self, what: str) -> None:
        if self._run is not None and self._run.exchange.is_over:  # all workers raised; none took the step
            self.abandon()
        if self._run is not None:
            raise UsageError(f"cannot {what} in step {self._step}: call average(), or abandon(), first")

    def _replay(self) -> Generator[Tower]:
        """Yield this worker's towers of the last step once more; see `StepRun.replay`."""
        self._step -= 1  # the loss may read `step`
        try:
            yield from self._last.run.replay()
        finally:
            self._step += 1
