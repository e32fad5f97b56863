"""Extensions of a `Trainer`: callbacks on every worker, and loggers on worker 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.towers.report import Report

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["PERIOD", "Callback", "Logger"]

PERIOD = "the steps between two calls of log"
"""What `Logger.every` is, in messages."""


class Callback:
    """Base class of callbacks, which a `Trainer` calls on every worker; its methods do nothing.

    A callback must make the same changes on all workers. If it has `state_dict` and `load_state_dict`, its
    state is part of the checkpoints, under the name of its class. An exception in a callback ends the run.

    Attributes:
        reads_gradients: whether the callback reads `p.grad` after a step. With a `ShardedOptimizer`, workers
            exchange all averaged gradients only for callbacks that read them: False saves a message per step.

    Example:
        >>> class Patience(Callback):
        ...     best, bad = 0.0, 0
        ...     def after_evaluation(self, trainer, metrics):
        ...         self.bad = 0 if metrics["accuracy"] > self.best else self.bad + 1
        ...         self.best = max(self.best, metrics["accuracy"])
        ...         if self.bad == 3:
        ...             trainer.stop()
        ...     def state_dict(self):
        ...         return {"best": self.best, "bad": self.bad}
        ...     def load_state_dict(self, state):
        ...         self.best, self.bad = state["best"], state["bad"]
    """

    reads_gradients: bool = True

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step, after the newest checkpoint has been loaded."""

    def before_step(self, trainer: Trainer, batch: Any) -> None:
        """Run before the step on `batch`; run again if the step is repeated because a worker was lost."""

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Run after a step's update; `trainer.step.towers.step` is the number of steps taken."""

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation; the metrics are the same on all workers."""

    def after_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Run after a checkpoint has been written, on worker 0 only, between two steps."""

    def on_end(self, trainer: Trainer) -> None:
        """Run at the end, also after an exception; what this raises is added to that as a note."""


class Logger(Callback):
    """Base class of loggers, which record a run's scalars; a `Trainer` calls them on worker 0 only.

    An exception in a logger is printed once, and the run continues without that logger.

    Attributes:
        every: steps between two calls of `log` with training scalars; None for the `log_every` of the
            trainer. At these steps `p.grad` is available, if `reads_gradients` is True.

    Example:
        >>> class Printed(Logger):
        ...     def log(self, step, scalars):
        ...         print(step, scalars["loss/total"])
    """

    every: int | None = None

    def on_regroup(self, trainer: Trainer, why: str) -> None:
        """Run after workers were lost or have joined, and the run continues.

        If worker 0 was lost, `on_start` is called on the loggers of the new worker 0 instead.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record scalars.

        Args:
            step: number of steps taken.
            scalars: finite numbers by name: "loss/...", "step/..." and "towers/..." in training; after an
                evaluation, its metrics under their own names.
        """
