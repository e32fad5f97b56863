"""`transformers.Trainer` with towers in place of devices.

The base class runs as if its process were the only one: it does not wrap the model, shard data, or sum and
divide gradients. This module does what workers do together: the towers' average, the distribution of
evaluation batches, and the choice of the worker that writes files.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from samestep.batches.batch import LocalBatch
from samestep.buffers.policies import Policy
from samestep.data.loader import TowerLoader
from samestep.errors import Error, NonFiniteError, UsageError, warn
from samestep.integrations.transformers.alike import (
    SameWeights,
    compare_runs,
    nets_beside,
    raising_together,
    share_error,
)
from samestep.integrations.transformers.alone import join, work_alone
from samestep.integrations.transformers.batches import Batches
from samestep.integrations.transformers.checkpoint import read_state, write_state
from samestep.integrations.transformers.evaluation import Prediction, Rounds
from samestep.integrations.transformers.labels import (
    asking,
    count_labels,
    expecting_labels,
    ignores_first,
    look_at_loss,
)
from samestep.integrations.transformers.refused import check_arguments, check_order, check_overrides
from samestep.integrations.transformers.requests import SharedRequests, may_ask_alone
from samestep.sharding.sharded_optimizer import ShardedOptimizer
from samestep.summation.placement import Placement
from samestep.towers.diagnosis import explain, first_nonfinite
from samestep.towers.optimizer import check_optimizer, settings_of
from samestep.towers.report import Report
from samestep.towers.tower import Tower
from samestep.towers.towers import Towers
from samestep.watching.model.own_numbers import OwnNumbers
from samestep.workers.agreement import agree
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["Trainer"]


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that takes the same steps, bit for bit, on any number of workers.

    Run the script with plain `python`, or under `torchrun` with any number of processes up to T. In a step,
    the global batch of T · `args.per_device_train_batch_size` rows is cut into T towers; the loss is the mean
    over all its tokens:

        loss = Σ_t (sum of the losses of tower t's labels that are not −100) / Σ_t (how many these are)

    Without integer `labels`, the loss is the mean over rows. The random streams of dropout depend on (seed,
    step, tower), and the order of the data on (`args.data_seed` or `args.seed`, epoch).

    Args:
        model: as for `transformers.Trainer`.
        args: as for `transformers.Trainer`; `per_device_train_batch_size` is the number of rows of a tower,
            and `gradient_accumulation_steps` must be 1.
        arguments: further arguments of `transformers.Trainer`, by position.
        towers: the number of towers, T; part of the experiment, like the batch size.
        job: from `samestep.init`; by default on `args.device`, with one CPU thread per worker.
        options: further arguments of `transformers.Trainer`, by name.

    Attributes:
        job: this process's view of the job.
        towers: the `samestep.Towers` of the model, once training has begun.
        report: the report of the last step.

    Raises:
        ConfigError: an argument cannot be used with towers, or T is below 1, or below the number of workers.
        NonFiniteError: in `train`, a gradient is NaN or infinite; the error names towers and parameters. With
            float16, such steps are skipped instead.

    Example:
        >>> from tempfile import mkdtemp
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        >>> rows = [{"input_ids": [n, n + 1, n + 2], "labels": [n, n + 1, n + 2]} for n in range(10)]
        >>> args = TrainingArguments(output_dir=mkdtemp(), per_device_train_batch_size=2, max_steps=2,
        ...                          report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True)
        >>> trainer = Trainer(model, args, train_dataset=rows, towers=4)
        >>> _ = trainer.train()
        {'train_runtime': ...}
        >>> trainer.report.rows, trainer.report.count
        (2, 4.0)
    """

    towers: Towers
    report: Report
    current_flos: float
    preprocess_logits_for_metrics: Any
    _preprocess: Any = None
    _looks_at_loss = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_order(cls, Trainer)

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *arguments: Any,
        towers: int,
        job: Job | None = None,
        **options: Any,
    ) -> None:
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        # First, so that an error on one worker can be raised on all of them.
        self.job = join(args.device.type, tf32=bool(args.tf32)) if job is None else job
        with raising_together(self.job, {"towers": towers}, where="Trainer"):
            check_overrides(type(self), Trainer)
            dataset = arguments[1] if len(arguments) > 1 else options.get("train_dataset")
            check_arguments(args, model, dataset, towers)
            self._placement = Placement.even(towers, self.job.world_size)
            work_alone(args, self.job)
            self._flos: list[int] = []  # of this worker's towers in a step
            self._skips_first: bool | None = None
            self._rounds: Rounds | None = None
            self._shared_error: BaseException | None = None  # the last error that all workers have raised
            super().__init__(model, args, *arguments, **options)
        # Before the user's callbacks, which may already use the weights, for example to upload them.
        self.callback_handler.callbacks.insert(0, SameWeights(self.job, self._buffer_policies))
        self._requests = SharedRequests(self.job)
        self._numbers = OwnNumbers()
        self._numbers.note(self)

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        """Compare the workers' arguments, and train.

        Raises:
            DisagreementError: workers have different arguments, or end with different weights.
        """
        may_ask = type(self) is not Trainer or may_ask_alone(self.callback_handler.callbacks)
        nets = nets_beside(self.model, vars(self))
        all_may_ask = compare_runs(self.job, self.args, self.train_dataset, nets, message=may_ask)
        self._requests.is_on = self.job.world_size > 1 and any(all_may_ask)
        self._requests.come_last(self.callback_handler)
        self._makes_towers = True  # an error before that is raised on all when Towers are created
        try:
            return super().train(*arguments, **options)
        except Exception as error:
            if self._makes_towers:
                agree(self.job, {}, where="Towers", error=error)
            if error is not self._shared_error:
                share_error(error, self.job)
            raise

    def create_towers(self) -> Towers:
        """Create the towers of `self.model` when training begins; override this for other options."""
        # Without the noise scale, whose measurement keeps the gradients of several towers in memory.
        return Towers(
            self.model, self._placement.num_towers, job=self.job, seed=self.args.seed, noise_every=0
        )

    def _buffer_policies(self) -> Mapping[str, Policy]:
        return self.towers._settings.buffers if hasattr(self, "towers") else {}

    def create_loader(self, dataset: Any, collate_fn: Any) -> TowerLoader:
        """Create the loader of `self.towers`, for a dataset from which unused columns were removed."""
        args = self.args
        names = ("num_workers", "persistent_workers", "multiprocessing_context", "prefetch_factor")
        options = {name: getattr(args, f"dataloader_{name}") for name in names}
        options["pin_memory"] = args.dataloader_pin_memory and self.job.device.type == "cuda"
        return TowerLoader(
            dataset,
            self.get_total_train_batch_size(args),
            self.towers,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
            collate_fn=collate_fn,
            **options,
        )

    def count_items(self, inputs: Any) -> Tensor | None:
        """Return the number of items, 0-dim, in the mean loss of these inputs; None for the number of rows.

        Items are integer labels that are not −100, without each row's first label if the model does not
        predict it. Override this if your loss is a mean over something else.
        """
        return count_labels(inputs, skip_first=bool(self._skips_first))

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the rows of the global batch: T · `per_device_train_batch_size`."""
        return int(self._placement.num_towers * args.per_device_train_batch_size)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader by which the base class counts steps; `get_batch_samples` reads the rows."""
        base = super().get_train_dataloader()
        self._makes_towers = False
        self.towers = self.create_towers()
        self._loader = self.create_loader(base.dataset, base.collate_fn)
        self._batches = Batches(self._loader)
        return DataLoader(
            base.dataset,
            self._loader.batch_size,
            drop_last=self._loader.drop_last,
            collate_fn=base.collate_fn,
            generator=torch.Generator(),  # or the loader would draw from the global generator
        )

    def get_batch_samples(self, *_: Any) -> tuple[list[LocalBatch], None]:
        """Return this worker's part of the next global batch, and None: each tower counts its own items."""
        if self._requests.has_stopped_epoch:
            self._requests.has_stopped_epoch = False
            self._batches.leave_epoch()
        return [next(self._batches)], None

    def training_step(self, model: nn.Module, inputs: LocalBatch, num_items_in_batch: Any = None) -> Tensor:
        """Run this worker's towers and average the gradients; return the loss, the same on all workers."""
        self._requests.come_last(self.callback_handler)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        must_match = {"global step": self.state.global_step, **settings_of(self.optimizer)}
        self._flos, scaler = [], self.accelerator.scaler
        try:
            check_optimizer(self.optimizer, self.towers._root.parameters())
            turns = self.towers(inputs, scaler=scaler, must_match=must_match)
            if self._skips_first is None and inputs.slices:  # inside the step, so that an error reaches all
                self._look_at_labels(model, next(iter(inputs.slices.values())))
            self._run_all(model, turns)
            self.report = self.towers.average()
        except BaseException as error:
            self._shared_error = error
            if "Towers(" in str(error):  # a remedy
                error.add_note("Override create_towers, which makes the Towers of a Trainer.")
            with contextlib.suppress(Error):
                self.towers.abandon()
            raise
        if self._looks_at_loss and inputs.slices and self.job.is_first:
            self._looks_at_loss = False
            look_at_loss(self, model, next(iter(inputs.slices.values())))
        if scaler is None and not self.report.skipped and not math.isfinite(self.report.grad_norm):
            parameters = first_nonfinite(self.towers, lambda tower: self._run(model, tower))
            ranges = inputs.ranges(self._placement.num_towers)
            raise NonFiniteError(explain(self.report, parameters, ranges))
        return torch.tensor(self.report.loss, device=self.args.device)

    def _run_all(self, model: nn.Module, turns: Iterator[Tower]) -> None:
        """Run this worker's towers; warn of numbers that a program's class keeps in this object."""
        self._numbers.start_step()
        for tower in turns:
            self._numbers.start_pass(tower._index)
            self._run(model, tower)
            self._numbers.check(partial(self.compute_loss, model))
            if self._numbers.has_warned:
                self.towers._replica.watch.note_explained()
            del tower  # its rows, before those of the next one are read

    def _run(self, model: nn.Module, tower: Tower) -> None:
        """Run a tower's forward and backward; its mean loss times the count is the sum that towers need."""
        inputs = self._prepare_inputs(dict(tower.batch))
        count = self.count_items(inputs)
        self._flos.append(self.floating_point_ops(inputs))
        divisor = None if count is None else count.clamp(min=1)
        with self.compute_loss_context_manager(), expecting_labels(self.model, inputs, self.label_names):
            loss = self.compute_loss(model, inputs, num_items_in_batch=divisor)
        if count is None:
            tower.backward(loss)
        else:
            loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
            loss = torch.where(count > 0, loss, 0)  # a mean over no labels is NaN
            tower.backward_sum(loss * count, count)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        count = self.count_items(batch_samples[0])
        return None if count is None else count.clamp(min=1).to(device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare a tower's inputs as the base class does."""
        if isinstance(inputs, LocalBatch):
            raise UsageError(
                "_prepare_inputs got the batch of a step, which has no inputs of its own: training_step is "
                "called once for all of a worker's towers; override compute_loss, which is called for each"
            )
        return super()._prepare_inputs(inputs)

    def _look_at_labels(self, model: nn.Module, inputs: Any) -> None:
        with asking(self, model, inputs) as (prepared, loss):
            self._skips_first = ignores_first(model, prepared, loss)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of a batch; for a step, those of this worker's towers."""
        of_step = isinstance(inputs, LocalBatch)
        return sum(self._flos) if of_step else int(super().floating_point_ops(inputs))

    def store_flos(self) -> None:
        """Add the floating-point operations of all workers since the last call to the state."""
        where = f"the log, checkpoint or end after step {self.state.global_step}"
        self.current_flos = sum(gather_objects(self.job.transport, self.current_flos, where))
        super().store_flos()

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the base class's loop on batches distributed over workers; average the loss over all items."""
        rounds = Rounds(dataloader, self.model, self.job, self.args.seed, self._buffer_policies())
        self._rounds = rounds
        # `prediction_step` applies it before logits are sent to other workers.
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            self.gather_function = lambda value: value  # the base class resets this at the end
            with rounds.together():
                output = super().evaluation_loop(
                    rounds, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        except Exception as error:
            self._shared_error = error
            raise
        finally:
            self.preprocess_logits_for_metrics, self._preprocess, self._rounds = self._preprocess, None, None
        if (loss := rounds.loss()) is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = loss
        rounds.end(output.metrics)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Predict a batch; in an evaluation loop, on one of the workers, see `Rounds`."""

        def predict(batch: Any) -> Prediction:
            if self._skips_first is None:
                self._look_at_labels(model, batch)
            count = self.count_items(batch)
            rows = (find_batch_size(batch) or 1) if count is None else int(count)
            found = super(Trainer, self).prediction_step(model, batch, prediction_loss_only, ignore_keys)
            loss, logits, labels = found
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            return Prediction(loss, rows, logits, labels)

        found = predict(inputs) if self._rounds is None else self._rounds.predict(inputs, predict)
        return found.loss, found.logits, found.labels

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, on worker 0; if that fails in a checkpoint, raise on all workers."""
        error: Exception | None = None
        try:
            super().save_model(output_dir, _internal_call)
        except Exception as raised:
            error = raised
        if self.is_in_train and _internal_call:  # afterwards all workers look for the best checkpoint
            self._shared_error = error
            agree(self.job, {}, where=f"the checkpoint after step {self.state.global_step}", error=error)
        elif error is not None:
            raise error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        if isinstance(optimizer, ShardedOptimizer) and not self.args.should_save:
            optimizer.state_dict()  # which all workers must call, with the one that saves it
        super()._save_optimizer_and_scheduler(output_dir)
        if self.control.should_epoch_stop:
            self._batches.leave_epoch()
        if self.args.should_save:
            write_state(output_dir, self.towers, self._loader)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        same = {"global step": self.state.global_step}
        with raising_together(self.job, same, where="resuming"):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                read_state(checkpoint, self.towers, self._loader)
        if self._loader.position != self.state.global_step and self.job.is_first:
            warn(
                f"the data goes on at batch {self._loader.position} after {self.state.global_step} steps, as "
                "a callback stopped an epoch: transformers counts epochs by steps, so that this run may have "
                "more steps than one that was not interrupted"
            )

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
