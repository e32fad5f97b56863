"""A run's steps and the actions that follow each step, while workers may be lost or join.

All workers do the same actions in the same order: a step, an evaluation and a checkpoint if they are due, the
next step. Each action needs all workers, so no worker is more than one action ahead. If a worker is lost, the
others undo the action that has begun and form a new process group. Those behind take the state of a worker
that is ahead, and all continue from there. No step is lost, and the bits are those of any other placement.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.app.evaluation import line_of
from samestep.app.hooks import Hooks
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.lock import RunLock
from samestep.app.regroup import meet_again, renewable_of, report_regroup
from samestep.app.resume import check_checkpoint, objects_of, put_back, small_states, write_checkpoint
from samestep.app.run_folder import tidy
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.handover import send_state, take_state
from samestep.checkpoint.switches import NamedSwitches, Switches
from samestep.errors import DataError, LostWorkerError, UsageError
from samestep.towers.report import Report
from samestep.workers.collectives import gather_objects

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["Loop"]


@dataclass(frozen=True)
class _Progress:
    """A worker's progress.

    Attributes:
        step: number of steps taken; −1 for a newcomer, which has no state yet.
        num_done: how many of the actions that follow the newest step are done.
        report: the report of the newest step.
        metrics: the metrics of the evaluation after that step.
        leads: whether the worker was worker 0 before.
        elapsed_s: how long the run has lasted.
        run_dir: the run's folder.
        switches: the layers' modes, and which parameters are trained.
    """

    step: int
    num_done: int
    report: Report | None
    metrics: Mapping[str, float] | None
    leads: bool
    elapsed_s: float
    run_dir: Path
    switches: NamedSwitches

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.num_done


class Loop:
    """Takes a run's steps up to the last one, or until any worker has to stop.

    Args:
        trainer: the run's trainer.
        lock: the lock of the run folder.
        interruption: this worker's stop flags.
        writer: writes the run's checkpoints.
        hooks: calls the run's callbacks and loggers.

    Attributes:
        flags: the OR of all workers' stop flags in the newest step.
        metrics: the metrics of the evaluation after the newest step; None if there was none.
    """

    def __init__(
        self,
        trainer: Trainer,
        lock: RunLock,
        interruption: Interruption,
        writer: CheckpointWriter,
        hooks: Hooks,
    ) -> None:
        self.flags = StopFlags(0)
        self.metrics: Mapping[str, float] | None = None
        self._trainer = trainer
        self._job = trainer.job
        self._renewable = renewable_of(trainer.job, objects_of(trainer))
        self._lock = lock
        self._interruption = interruption
        self._writer = writer
        self._hooks = hooks
        self._can_be_saved = False  # whether this is known
        self._batches: Iterator[Any] | None = None
        self._before: dict[str, Any] | None = None  # `small_states` before the step that has begun
        self._report: Report | None = None
        self._has_state = not self._job.is_newcomer
        self._leads = self._job.is_first
        self._shown = (-1, 0)  # the newest step passed to the hooks, and 1 if its evaluation was, too
        at_end = (self._finish_writing, self._evaluate_at_end, self._compare_at_end)
        self._rest = (self._evaluate, self._write, *at_end)
        # After a step of an earlier run, only the actions at the end of a run are left to do.
        self._num_done = self._rest.index(self._finish_writing)

    @property
    def _step(self) -> int:
        return self._trainer.step.towers.step

    @property
    def _is_last(self) -> bool:
        """Whether the newest step is the last one."""
        is_stopped = self.flags.reason is not None or StopFlags.ENOUGH in self.flags
        return is_stopped or self._step >= self._trainer.steps

    def join(self) -> None:
        """Join the workers that train, if this is a newcomer; from here on other workers may be lost."""
        if self._renewable is not None:
            if self._job.is_newcomer:
                meet_again(self._job, self._catch_up)
            self._renewable.can_go_on()

    def run(self) -> None:
        """Do all steps and the actions that follow them, regrouping when workers are lost."""
        while not (self._is_last and self._num_done == len(self._rest)):
            try:
                self._go_on()
            except LostWorkerError as error:
                if self._renewable is None:
                    raise
                self._regroup(str(error))
        if self._renewable is not None:
            self._renewable.finish()

    def _go_on(self) -> None:
        if self._num_done < len(self._rest):
            start_s = time.perf_counter()
            self._rest[self._num_done]()
            self._num_done += 1
            self._hooks.leave_out(time.perf_counter() - start_s)
        elif StopFlags.REGROUP in self.flags:
            self._regroup("new workers have joined")
        else:
            self._take_step()

    def _take_step(self) -> None:
        if self._renewable is not None:
            self._before = small_states(self._trainer)
        batch = self._next_batch()
        self._hooks.before_step(batch)
        keep = self._hooks.read_gradients()
        report = self._trainer.step(batch, flags=self._own_flags, keep_gradients=keep)
        # The step is taken. No line below waits for another worker, unless a callback does.
        self._before, self._report, self._num_done, self.metrics = None, report, 0, None
        self.flags = StopFlags(report.flags)
        self._show_step(report)

    def _show_step(self, report: Report) -> None:
        with self._shown_once("after_step"):
            self._hooks.after_step(report)
        self._shown = (self._step, 0)
        if self.flags.reason is not None:
            self._interruption.acknowledge(self.flags)

    def _show_metrics(self, metrics: Mapping[str, float]) -> None:
        with self._shown_once("after_evaluation"):
            self._hooks.evaluated(metrics)
        self._shown = (self._step, 1)

    @contextmanager
    def _shown_once(self, method: str) -> Iterator[None]:
        """Explain the error if a worker is lost while callbacks exchange messages in this method."""
        try:
            yield
        except LostWorkerError as error:
            if self._renewable is None:
                raise
            raise UsageError(
                f"step {self._step}: a worker was lost while a callback's {method} exchanged messages, and "
                "these cannot be repeated: expected messages in before_step and evaluations only"
            ) from error

    def _own_flags(self) -> StopFlags:
        flags = self._interruption.flags()
        if self._writer.has_failed:  # the checkpoint requested here raises the error on all workers
            flags |= StopFlags.CHECKPOINT
        if self._trainer.is_stopping:
            flags |= StopFlags.ENOUGH
        if flags.reason is None and self._job.is_first and self._renewable is not None:
            flags |= StopFlags.REGROUP if self._renewable.is_due() else 0
        return flags

    def _next_batch(self) -> Any:
        """Return the next batch of this epoch, or the first one of the next epoch."""
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self._trainer.loader)
            for batch in self._batches:
                return batch
            self._batches = None
        name = type(self._trainer.loader).__name__
        raise DataError(f"{name} gave no batch: expected at least one per epoch")

    # ---- actions after a step ------------------------------------------------------------------------

    def _evaluate(self) -> None:
        every = 0 if self._trainer.evaluate is None else self._trainer.evaluate_every
        if every > 0 and self._step % every == 0:
            self._measure()
            self._trainer.print_on_first(line_of(self._step, self.metrics or {}))

    def _measure(self) -> None:
        if self._trainer.evaluate is not None:
            self.metrics = self._trainer.measure()
            self._show_metrics(self.metrics)

    def _write(self) -> None:
        if _is_checkpoint_due(self._step, self.flags, self._trainer):
            write_checkpoint(self._trainer, self._writer)
        elif not self._can_be_saved:  # optimizers have their state from the first step on
            check_checkpoint(self._trainer)
        self._can_be_saved = True
        self._hooks.written(self._writer.take_written())

    def _finish_writing(self) -> None:
        if self._is_last:
            self._writer.wait()
            self._hooks.written(self._writer.take_written())

    def _evaluate_at_end(self) -> None:
        if self._is_last:
            self._interruption.end()
            if self.flags.reason is None and self.metrics is None:
                self._measure()

    def _compare_at_end(self) -> None:
        """Compare the weights of all workers: callbacks may have changed them since the last checkpoint."""
        if self._is_last and self.metrics is not None:
            for towers, beside in objects_of(self._trainer).compared:
                towers._check_weights(f"step {towers.step}, the end", beside)

    # ---- regrouping after workers are lost or have joined --------------------------------------------

    def _regroup(self, why: str) -> None:
        """Undo the action that has begun, and continue with the remaining workers and newcomers."""
        if self._before is not None:
            put_back(self._trainer, self._before)
            self._before = None
        self._batches = None
        meet_again(self._job, self._catch_up)
        if self._job.is_first:
            report_regroup(why, self._job, self._step)
            self._lock.take_over()
            if not self._leads:
                tidy(self._lock.checkpoints)
            self._hooks.take_over(why, was_first=self._leads)
        self._leads = self._job.is_first

    @property
    def _progress(self) -> _Progress:
        step = self._step if self._has_state else -1
        elapsed_s = self._interruption.elapsed_s
        objects = objects_of(self._trainer)
        done = (step, self._num_done, self._report, self.metrics, self._leads, elapsed_s)
        return _Progress(*done, self._lock.run_dir, Switches.now(objects).by_name(objects))

    def _catch_up(self) -> None:
        """Exchange progress with the others; take the state of a worker that is ahead of this one."""
        trainer, own = self._trainer, self._progress
        progress = gather_objects(self._job.transport, own, "how far the workers are")
        ahead = max(progress, key=lambda each: each.order)
        behind = [worker for worker, each in enumerate(progress) if each.order < ahead.order]
        trainer.run_dir = self._lock.run_dir = ahead.run_dir
        trainer.step.towers._leave_behind()
        objects = objects_of(trainer)
        handed = send_state(objects, self._job, progress.index(ahead), behind) if behind else None
        # No line below waits for another worker, so a state is taken over completely or not at all.
        self.flags = StopFlags(0 if ahead.report is None else ahead.report.flags) & ~StopFlags.REGROUP
        self._interruption.start_earlier(max(each.elapsed_s for each in progress))
        if handed is not None:
            trainer.step.towers._step = ahead.step
            self._show(own, ahead)
            take_state(handed[0], objects)
        Switches.of(objects, ahead.switches).restore()
        self._report, self.metrics, self._num_done = ahead.report, ahead.metrics, ahead.num_done
        self._has_state = True
        trainer.step.towers._agree_again()
        if self._num_done == self._rest.index(self._finish_writing) and not progress[0].leads:
            self._num_done -= 1  # worker 0 was lost, perhaps before it had written the checkpoint

    def _show(self, own: _Progress, ahead: _Progress) -> None:
        """Call the hooks for the action that the others have finished and this worker has not."""
        if own.step < 0:
            return
        if ahead.report is not None and self._shown < (ahead.step, 0):
            self._show_step(ahead.report)
        if ahead.metrics is not None and self._shown < (ahead.step, 1):
            self._show_metrics(ahead.metrics)


def _is_checkpoint_due(step: int, flags: StopFlags, trainer: Trainer) -> bool:
    """Return whether a checkpoint is due after `step` steps; the same on every worker."""
    is_planned = step % trainer.checkpoint_every == 0 or step >= trainer.steps
    return is_planned or bool(flags & ~StopFlags.REGROUP)
