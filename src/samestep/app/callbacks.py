"""What a program may add to a `Trainer`: callbacks on every worker, and loggers on worker 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.towers.report import Report

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["Callback", "Logger"]


class Callback:
    """Does something of a program's own at points of a run, on every worker; here nothing.

    What it changes must be changed alike on all workers, as in any program. One with `state_dict` and
    `load_state_dict` is part of the checkpoints, by the name of its class. What it raises ends the run.

    Attributes:
        reads_gradients: whether it looks at `p.grad` after a step. With a `ShardedOptimizer` no worker has
            all averages unless somebody does: set it to False where nobody does, to save a message a step.

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
        """Do something before the first step, once an earlier run has been continued."""

    def before_step(self, trainer: Trainer, batch: Any) -> None:
        """Do something before a step that will be taken on `batch`; again, where a worker is lost in it."""

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Do something after a step's update; `trainer.step.towers.step` is the number of steps taken."""

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Do something with metrics, which are the same on all workers."""

    def after_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Do something with a checkpoint that is on the disk, on worker 0 alone, between two steps."""

    def on_end(self, trainer: Trainer) -> None:
        """Do something at the end, also where the run ends by an exception."""


class Logger(Callback):
    """Keeps what a run measures; it is called on worker 0 alone.

    What it raises is said once, and the run goes on without it.

    Attributes:
        every: steps between two calls of `log` with what training measured; None for the `log_every` of the
            trainer. At these steps `p.grad` is there, where it `reads_gradients`.

    Example:
        >>> class Printed(Logger):
        ...     def log(self, step, scalars):
        ...         print(step, scalars["loss/total"])
    """

    every: int | None = None

    def on_regroup(self, trainer: Trainer, why: str) -> None:
        """Do something after workers were lost, or came: the run goes on with others.

        Where worker 0 was lost, the loggers of the new one get `on_start` instead.
        """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep what was measured after so many steps.

        Args:
            step: steps taken.
            scalars: finite numbers by name: of training "loss/...", "step/..." and "towers/...", and
                after an evaluation its metrics, by the names that they have there.
        """
