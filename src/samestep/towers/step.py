"""One optimizer update from one global batch: forward, backward, average, check, clip, update."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.errors import ConfigError, NonFiniteError
from samestep.towers.counts import Count, check_counts
from samestep.towers.diagnosis import explain, explain_whole, first_nonfinite
from samestep.towers.report import Report
from samestep.towers.run import Tower
from samestep.towers.towers import Towers

__all__ = ["LossFunction", "Schedule", "Step"]

LossFunction = Callable[..., Any]
"""loss_fn(model, tower_batch) -> the mean over the rows, or (a sum, what it counts), or, with
`counts`, a mapping that has a sum for each of their names.

With `forward`: loss_fn(model, all_outputs, batch) -> the loss of the whole batch, a scalar.
"""


class Schedule(Protocol):
    """Anything with `step()`, such as torch's learning rate schedulers."""

    def step(self) -> Any:
        """Move on by one update."""


class Step:
    """One whole optimizer step, the same on every worker.

    Args:
        towers: of the model to train.
        loss_fn: called as `loss_fn(model, tower_batch)`; see `LossFunction`.
        optimizer: updated once a step.
        forward: for a loss of the whole batch, called as `forward(model, tower_batch)`; what it returns for
            all towers is what `loss_fn` gets. See `Towers.whole_batch`.
        clip_norm: clip the averaged gradient to this 2-norm; by default not at all.
        autocast: torch.bfloat16 or torch.float16 for mixed precision; float16 brings a `GradScaler`.
        scheduler: stepped once after each update.
        averaged_model: torch's `AveragedModel`, updated once after each update.
        on_nonfinite: "raise", or "skip" the update, when the averaged gradient is not finite. With
            float16 such updates are always skipped and the loss scale is lowered. A step that is skipped
            leaves weights, buffers, scheduler and averaged model as they were.
        counts: what the sums of a loss count, by name; see `Towers.__call__`.

    Attributes:
        scaler: the `torch.amp.GradScaler`, or None.

    Raises:
        ConfigError: an `autocast` or `on_nonfinite` that does not exist, `clip_norm` not above 0, or
            `counts` that are no mapping of functions.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(Towers(model, 4), lambda model, x: model(x).square().mean(),
        ...             torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
        >>> step(torch.randn(10, 2)).rows
        10
    """

    def __init__(  # noqa: PLR0913 - the parts of a step, each with a default
        self,
        towers: Towers,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        scheduler: Schedule | None = None,
        averaged_model: AveragedModel | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        counts: Mapping[str, Count] | None = None,
    ) -> None:
        check_counts(counts)
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(f"autocast = {autocast}: expected torch.bfloat16, torch.float16 or None")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigError(f"clip_norm = {clip_norm}: expected a number above 0, or None")
        if on_nonfinite not in ("raise", "skip"):
            raise ConfigError(f"on_nonfinite = {on_nonfinite!r}: expected 'raise' or 'skip'")
        self.towers = towers
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.forward = forward
        self.clip_norm = clip_norm
        self.autocast = autocast
        self.scheduler = scheduler
        self.averaged_model = averaged_model
        self.on_nonfinite = on_nonfinite
        self.counts = counts
        device = towers.job.device.type
        self.scaler = torch.amp.GradScaler(device) if autocast is torch.float16 else None

    def __call__(self, batch: Any, *, flags: Callable[[], int] = int) -> Report:
        """Take one step.

        Args:
            batch: a global batch, or a `LocalBatch` from a `TowerLoader`.
            flags: as for `Towers.__call__`.

        Raises:
            NonFiniteError: the averaged gradient is NaN or infinite and `on_nonfinite` is "raise". It names
                the towers, their rows and their first parameters with such a gradient; to find out, the
                passes run once more. Weights and buffers are still those of before.
            BatchError: nothing in the batch counts, and `towers` does not skip such batches.
        """
        if self.forward is None:
            for tower in self.towers(batch, counts=self.counts, scaler=self.scaler, flags=flags):
                self._run(tower)
                del tower  # its rows, before those of the next one are read
        else:
            model = self.towers.model
            with self._precision():
                forward, loss = partial(self.forward, model), partial(self.loss_fn, model)
                self.towers.whole_batch(batch, forward, loss, scaler=self.scaler, flags=flags)
        report = self.towers.average()
        if report.skipped:
            return report
        if not self._prepare_gradients(report):
            return self._leave_out(report)
        self._update()
        return report

    def _run(self, tower: Tower) -> None:
        with self._precision():
            result = self.loss_fn(self.towers.model, tower.batch)
        if isinstance(result, tuple):
            tower.backward_sum(*result)
        else:
            tower.backward(result)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.towers.job.device.type, self.autocast)

    def _prepare_gradients(self, report: Report) -> bool:
        """Unscale, check and clip the average; say whether it is finite."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if not math.isfinite(report.grad_norm):
            return False
        if self.clip_norm is not None:
            is_double = any(gradient.dtype == torch.float64 for gradient in report.gradients)
            dtype = torch.float64 if is_double else torch.float32
            norm = torch.tensor(report.grad_norm, dtype=dtype, device=self.towers.job.device)
            torch.nn.utils.clip_grads_with_norm_(self.towers.parameters, self.clip_norm, norm)
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
        if self.scaler is not None:
            self.scaler.step(self.optimizer)  # does nothing but note that it was asked
            self.scaler.update()
        elif self.on_nonfinite == "raise":
            if self.forward is not None:
                raise NonFiniteError(explain_whole(report))
            raise NonFiniteError(explain(report, first_nonfinite(self.towers, self._run)))
        self.towers.put_back_buffers()
        return dataclasses.replace(report, skipped=True)
