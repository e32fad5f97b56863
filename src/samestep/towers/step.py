"""One optimizer update from one global batch: forward, backward, average, check, clip, update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.arguments import check_callable, check_kind, positive
from samestep.errors import ConfigError, Error, NonFiniteError, UsageError
from samestep.towers.counts import Count, check_counts
from samestep.towers.diagnosis import explain, first_nonfinite
from samestep.towers.division import UpdatesShards
from samestep.towers.losses import LossSum
from samestep.towers.opening import StepOptions
from samestep.towers.optimizer import check_can_step, check_optimizer, settings_of
from samestep.towers.report import Report
from samestep.towers.tower import Tower
from samestep.towers.towers import Towers

__all__ = ["LossFunction", "Schedule", "Step"]

LossFunction = Callable[..., Any]
"""loss_fn(model, tower_batch) -> the mean loss over the rows, or a `samestep.LossSum`, or, with `counts`, a
mapping with a sum for each of their names.

With `forward`: loss_fn(model, all_outputs, batch) -> the loss of the whole batch, a scalar.
"""


class Schedule(Protocol):
    """Anything with `step()`, such as torch's learning rate schedulers."""

    def step(self) -> Any: ...  # noqa: D102


@dataclass(eq=False, repr=False)
class Step:
    """One whole optimizer step, the same on every worker.

    Args:
        towers: the towers of the model to train.
        loss_fn: `loss_fn(model, tower_batch)` -> the mean loss over the tower's rows, or a `LossSum`, or,
            with `counts`, a mapping with a sum for each of their names.
        optimizer: the optimizer; its `step` is called once per step.
        forward: for a loss of the whole batch, called as `forward(model, tower_batch)`; the outputs of all
            towers are passed to `loss_fn(model, all_outputs, batch)`. See `Towers.whole_batch`.
        clip_norm: clip the averaged gradient to this 2-norm; None does not clip.
        autocast: torch.bfloat16 or torch.float16 for mixed precision; float16 adds a `GradScaler`.
        scheduler: stepped once after each update.
        averaged_model: torch's `AveragedModel`, updated once after each update.
        on_nonfinite: "raise", or "skip" the update, when the averaged gradient is not finite. With
            float16 such updates are always skipped and the loss scale is lowered. A skipped step does not
            change weights, buffers, scheduler or averaged model.
        counts: functions that count what each named sum of the loss is divided by; see `Towers.__call__`.

    Attributes:
        scaler: the `torch.amp.GradScaler`, or None.

    Raises:
        ConfigError: an unknown `autocast` or `on_nonfinite`, `clip_norm` not above 0, an optimizer or a
            scheduler whose `step` needs an argument, or `counts` that are not a mapping of functions; when
            called, an optimizer that updates parameters whose gradients `towers` does not average.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(Towers(model, 4), lambda model, x: model(x).square().mean(),
        ...             torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
        >>> step(torch.randn(10, 2)).rows
        10
    """

    towers: Towers
    loss_fn: LossFunction
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    forward: Callable[[nn.Module, Any], Any] | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    scheduler: Schedule | None = None
    averaged_model: AveragedModel | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    counts: Mapping[str, Count] | None = None
    scaler: torch.amp.GradScaler | None = field(init=False)

    def __post_init__(self) -> None:
        check_kind("towers", self.towers, Towers, "the samestep.Towers of the model")
        _check_loss(self.loss_fn)
        check_counts(self.counts)
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(f"autocast = {self.autocast}: expected torch.bfloat16, torch.float16 or None")
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm, "or None")
        check_can_step("optimizer", self.optimizer)
        if self.scheduler is not None:
            check_can_step("scheduler", self.scheduler)
        if self.averaged_model is not None and not hasattr(self.averaged_model, "update_parameters"):
            raise ConfigError(
                f"averaged_model is a {type(self.averaged_model).__name__}: expected an AveragedModel of "
                "torch, or a module with update_parameters(model)"
            )
        if self.on_nonfinite not in ("raise", "skip"):
            raise ConfigError(f"on_nonfinite = {self.on_nonfinite!r}: expected 'raise' or 'skip'")
        device = self.towers.job.device.type
        self.scaler = torch.amp.GradScaler(device) if self.autocast is torch.float16 else None

    def __call__(self, batch: Any, *, flags: Callable[[], int] = int, keep_gradients: bool = False) -> Report:
        """Take one step.

        The settings of the step and of the optimizer must be the same on all workers. If a pass raises, the
        step is abandoned (see `Towers.abandon`).

        Args:
            batch: as for `Towers.__call__`.
            flags: as for `Towers.__call__`.
            keep_gradients: with a `ShardedOptimizer`, leave all averages in `p.grad` on all workers. By
                default each worker gets only the averages of its shard, and every `p.grad` ends as None.

        Raises:
            NonFiniteError: the averaged gradient is NaN or infinite and `on_nonfinite` is "raise". The
                message names the towers, their rows and the first parameter concerned; finding them runs the
                passes once more. Weights and buffers are as before the step.
            BatchError: nothing in the batch counts, and `towers` does not skip such batches.
        """
        sharded = None if keep_gradients else self._sharded
        # A scaler reads all averages, and so may hooks on the optimizer's step.
        division = None if sharded is None or self.scaler is not None else sharded._division_now()
        pass_function = partial(self.loss_fn if self.forward is None else self.forward, self.towers.model)
        try:
            report = self._average(
                batch, StepOptions(self.scaler, flags, self._must_match, division, pass_function)
            )
        except BaseException:
            # So that the other workers do not wait. An error raised here would hide the original one.
            with contextlib.suppress(Error):
                self.towers.abandon()
            raise
        if report.skipped:
            return report
        try:
            if self._prepare_gradients(report):
                self._update()
                return report
            return self._leave_out(report)
        finally:
            if sharded is not None:
                sharded._let_go()

    @property
    def _sharded(self) -> UpdatesShards | None:
        return self.optimizer if isinstance(self.optimizer, UpdatesShards) else None

    def _average(self, batch: Any, options: StepOptions) -> Report:
        towers = self.towers
        if self.forward is None:
            turns = towers._loop(batch, self.counts, options)
            check_optimizer(self.optimizer, towers._replica.parameters)
            for tower in turns:
                self._run(tower)
                del tower  # frees its rows before the next tower's are read
        else:
            forward, loss = partial(self.forward, towers.model), partial(self.loss_fn, towers.model)
            with self._precision():
                towers._run_whole_batch(batch, forward, loss, options)
            check_optimizer(self.optimizer, towers._replica.parameters)
        return towers.average()

    @property
    def _must_match(self) -> dict[str, Any]:
        """Settings that must be the same on all workers; values on a GPU are left out, to avoid a sync."""
        settings: dict[str, Any] = {
            name: getattr(self, name) for name in ("clip_norm", "autocast", "on_nonfinite")
        }
        return settings | {"optimizer": type(self.optimizer).__name__, **settings_of(self.optimizer)}

    def _run(self, tower: Tower) -> None:
        with self._precision():
            result = self.loss_fn(self.towers.model, tower.batch)
        if isinstance(result, LossSum):
            tower.backward_sum(result.total, result.count)
        elif isinstance(result, tuple):
            raise UsageError(
                f"{tower!r}: loss_fn returned a tuple of {len(result)}: expected only the mean loss over the "
                "tower's rows, without metrics, or samestep.LossSum(total, count) for a sum over tokens or "
                "pixels"
            )
        else:
            tower.backward(result)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.towers.job.device.type, self.autocast)

    def _prepare_gradients(self, report: Report) -> bool:
        """Unscale, check and clip the average; return whether it is finite."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if not math.isfinite(report.grad_norm):
            return False
        if self.clip_norm is not None:
            shards = None if self._sharded is None else self._sharded._take_averages()
            found = self.towers._last.run.parameters if shards is None else shards
            torch.nn.utils.clip_grads_with_norm_(found, self.clip_norm, report.norm)
        return True

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.averaged_model is not None:
            self.averaged_model.update_parameters(self.towers.model)

    def _leave_out(self, report: Report) -> Report:
        self.towers._last.run.put_back()
        if self.scaler is not None:
            # The norm may overflow although every gradient is finite; the scaler would then take the step.
            self.optimizer.zero_grad()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.on_nonfinite == "raise":
            parameters = None if self.forward is not None else first_nonfinite(self.towers, self._run)
            ranges = self.towers._last.run.ranges
            raise NonFiniteError(explain(report, parameters, ranges))
        return replace(report, skipped=True)


def _check_loss(loss_fn: object) -> None:
    check_callable("loss_fn", loss_fn, "a function loss_fn(model, batch)")
    if isinstance(loss_fn, nn.Module) and type(loss_fn).__module__.startswith("torch.nn."):
        raise ConfigError(
            f"loss_fn is torch's {type(loss_fn).__name__}, a function of outputs and labels: expected one of "
            "the model and a batch, such as lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
