"""Calls to a run's callbacks and loggers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.app.callbacks import Callback, Logger
from samestep.app.display import Display
from samestep.app.lock import RunLock
from samestep.app.loggers.json_lines import JsonLines
from samestep.app.resume import objects_of
from samestep.app.scalars import Before, Scalars
from samestep.errors import Error, one_line
from samestep.towers.report import Report
from samestep.workers.collectives import gather_objects

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["Hooks"]


class Hooks:
    """Calls the loggers, which may fail, on worker 0, and the callbacks on all workers.

        with Hooks(trainer, lock) as hooks:
            hooks.before_step(batch)
            hooks.after_step(step(batch))

    Args:
        trainer: the run's trainer.
        lock: the lock of the run folder.
    """

    def __init__(self, trainer: Trainer, lock: RunLock) -> None:
        self._trainer = trainer
        self._terms = trainer.terms
        self._before = Before({}, [])
        self._lock = lock
        self._loggers: list[Logger] = []
        self._started: list[Callback] = []
        self._scalars: dict[int | None, Scalars] = {}
        self._logged: list[Callable[[Logger], None]] = []  # calls made after step `_logged_step`
        self._logged_step = -1
        self._gradients_every: set[int | None] = set()  # periods in steps at which `p.grad` is read

    def __enter__(self) -> Hooks:
        if objects_of(self._trainer).are_sharded:  # otherwise every worker has all of `p.grad` in any case
            self._gradients_every = self._find_readers()
        try:
            self._start_loggers()
            for callback in self._trainer.callbacks:
                callback.on_start(self._trainer)
                self._started.append(callback)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._trainer.ending is None:
            self._trainer.ending = _in_words(error)
        first = error
        for callback in reversed(self._started):  # all of them, also if one raises
            try:
                callback.on_end(self._trainer)
            except BaseException as later:
                what = f"{type(callback).__name__}.on_end raised {_in_words(later)}"
                if first is None:
                    first = later
                else:
                    first.add_note(f"samestep: {what}")
        if first is not None and self._trainer.ending in (None, "done"):
            self._trainer.ending = _in_words(first)
        self._log(lambda logger: logger.on_end(self._trainer))
        if first is not error and first is not None:
            raise first

    def _start_loggers(self) -> None:
        loggers = [Display(), JsonLines(self._lock), *self._trainer.loggers]
        self._loggers = loggers if self._trainer.job.is_first else []
        # Loggers with the same period share their scalars. A worker that may become worker 0 keeps them, too.
        kept = loggers if self._trainer.job.renewable is not None else self._loggers
        new = {logger.every: Scalars(self._trainer.job.device) for logger in kept}
        self._scalars = new | self._scalars
        self._log(lambda logger: logger.on_start(self._trainer))

    def _find_readers(self) -> set[int | None]:
        """Return the periods at which any callback or logger of any worker reads `p.grad`."""
        loggers = self._trainer.loggers if self._trainer.job.is_first else ()
        own = {logger.every for logger in loggers if logger.reads_gradients}
        own |= {1 for callback in self._trainer.callbacks if callback.reads_gradients}
        return set().union(*gather_objects(self._trainer.job.transport, own, "callbacks"))

    def read_gradients(self) -> bool:
        """Whether any callback or logger will read `p.grad` after the next step."""
        step = self._trainer.step.towers.step + 1
        return any(self._is_due(step, every) for every in self._gradients_every)

    def take_over(self, why: str, *, was_first: bool) -> None:
        """Continue on worker 0 after workers were lost or have joined.

        Args:
            why: the reason, for the loggers.
            was_first: whether this worker was worker 0 before; if not, start its loggers.
        """
        if was_first:
            self._log(lambda logger: logger.on_regroup(self._trainer, why))
        else:
            self._start_loggers()
            if self._logged_step == self._trainer.step.towers.step:
                for action in self._logged:  # the lost worker 0 may not have made these calls
                    self._log(action)

    def before_step(self, batch: Any) -> None:
        """Call `before_step` of loggers and callbacks."""
        if self._scalars:
            self._before = self._look()
        self._log(lambda logger: logger.before_step(self._trainer, batch))
        for callback in self._trainer.callbacks:
            callback.before_step(self._trainer, batch)

    def after_step(self, report: Report) -> None:
        """Call `after_step` of loggers and callbacks, and log the scalars that are due."""
        self._log(lambda logger: logger.after_step(self._trainer, report))
        for every, scalars in self._scalars.items():
            scalars.add(report, self._before)
            if self._is_due(report.step + 1, every):
                self._show(report.step + 1, every, scalars.read())
        for callback in self._trainer.callbacks:
            callback.after_step(self._trainer, report)

    def leave_out(self, seconds: float) -> None:
        """Leave out time in which no step ran from the speed that is logged."""
        for scalars in self._scalars.values():
            scalars.leave_out(seconds)

    def _is_due(self, step: int, every: int | None) -> bool:
        is_last = every is None and step >= self._trainer.steps
        return step % (every or self._trainer.log_every) == 0 or is_last

    def _show(self, step: int, every: int | None, found: Mapping[str, float]) -> None:
        self._log_and_keep(step, lambda logger: logger.log(step, found) if logger.every == every else None)

    def _look(self) -> Before:
        try:
            return Before.of(self._trainer.step, self._terms)
        except Exception as error:
            if self._terms is None:
                raise
            self._terms = None
            if self._loggers:
                _say("terms", error)
            return self._look()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of an evaluation to loggers and callbacks."""
        step = self._trainer.step.towers.step
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}

        def show(logger: Logger) -> None:
            logger.after_evaluation(self._trainer, metrics)
            logger.log(step, finite)

        self._log_and_keep(step, show)
        for callback in self._trainer.callbacks:
            callback.after_evaluation(self._trainer, metrics)

    def written(self, paths: Sequence[Path]) -> None:
        """Call `after_checkpoint` for checkpoints that have been written."""
        for path in paths:
            self._log(lambda logger, path=path: logger.after_checkpoint(self._trainer, path))  # type: ignore[misc]
            for callback in self._trainer.callbacks:
                callback.after_checkpoint(self._trainer, path)

    def _log_and_keep(self, step: int, action: Callable[[Logger], None]) -> None:
        """Call `action` for each logger, and keep it in case this worker takes over as worker 0."""
        if step != self._logged_step:
            self._logged, self._logged_step = [], step
        self._logged.append(action)
        self._log(action)

    def _log(self, action: Callable[[Logger], None]) -> None:
        """Call `action` for each logger; a logger that raises is not called again."""
        for logger in list(self._loggers):
            try:
                action(logger)
            except Exception as error:
                self._loggers.remove(logger)
                _say(type(logger).__name__, error)


def _in_words(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))


def _say(what: str, error: Exception) -> None:
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    reason = getattr(error, "strerror", None) or text
    print(f"samestep: {what} failed ({one_line(reason)}); going on without it", file=sys.stderr, flush=True)
