"""The loop around a step: progress, checkpoints, and the metrics at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

from samestep.app.display import Display, print_placement
from samestep.app.evaluation import describe, evaluate
from samestep.app.experiment import Experiment
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.lock import RunLock
from samestep.app.resume import resume, write_checkpoint
from samestep.app.run_folder import clear
from samestep.app.settings import Settings
from samestep.app.summaries import FOLDER, Summaries, write_metrics
from samestep.app.writer import CheckpointWriter
from samestep.errors import ConfigError
from samestep.identity import digest
from samestep.towers.report import Report
from samestep.workers.agreement import from_first_worker
from samestep.workers.environment import may_restart
from samestep.workers.job import Job

__all__ = ["train"]


def train(settings: Settings, job: Job) -> int:
    """Train a recipe from its newest checkpoint, if there is one, to its last step.

    Prints the metrics on the test examples and, last, `weights sha256 <hex>`. A signal or a time limit
    stops it earlier: after the same step on all workers, with a checkpoint, and without metrics.

    Returns:
        The exit status: 0, or 128 + the number of the signal that stopped it.

    Raises:
        ConfigError: the run folder holds another experiment, or `fresh` would delete more than once.
        DataError: it holds checkpoints, but none that is whole.
        LockedError: another process trains in it.
        LostWorkerError: another worker is gone or silent.
        StorageError: a checkpoint cannot be written.
    """
    _check_fresh(settings)
    interruption = Interruption(
        job, max_seconds=settings.max_seconds, checkpoint_minutes=settings.checkpoint_minutes
    )
    with RunLock(settings.run_dir, job) as lock:
        return _run(settings, job, interruption, lock)


def _run(settings: Settings, job: Job, interruption: Interruption, lock: RunLock) -> int:
    if settings.fresh:
        from_first_worker(job, lambda: _start_over(settings, lock))
    from_first_worker(job, settings.check_same_experiment)
    experiment = settings.build(job)
    resume(experiment, settings, lock)
    from_first_worker(job, lambda: _note(settings, lock))
    if settings.log_device_placement:
        print_placement(experiment.step.towers)
    flags = _train(experiment, settings, interruption, lock)
    if flags.reason is not None:
        if job.is_first:
            sys.stdout.flush()
            sys.stderr.write(_goodbye(experiment.step.towers.step, flags))
        return flags.exit_status
    metrics = evaluate(experiment, job)
    if job.is_first:
        print(describe(metrics))
        print(f"weights sha256 {digest(experiment.model)}", flush=True)
        lock.check()
        write_metrics(settings.run_dir, experiment.step.towers.step, metrics)
    return 0


def _start_over(settings: Settings, lock: RunLock) -> None:
    clear(lock.checkpoints)
    shutil.rmtree(settings.run_dir / FOLDER, ignore_errors=True)
    (settings.run_dir / "settings.json").unlink(missing_ok=True)


def _note(settings: Settings, lock: RunLock) -> None:
    lock.check()
    settings.write()


def _train(
    experiment: Experiment, settings: Settings, interruption: Interruption, lock: RunLock
) -> StopFlags:
    """Take steps to the last one, or until any worker has to stop; return the stop flags."""
    display = Display(settings, lock.job, experiment.step.towers)
    summaries = Summaries(settings.run_dir, experiment, every=settings.summary_every)
    writer = CheckpointWriter(lock, keep_last=settings.keep_checkpoints, keep_every=settings.keep_every)
    flags = StopFlags(0)
    with interruption, display, summaries, writer:
        for report in _steps(experiment, summaries, settings.steps, interruption, writer):
            display.show(report)
            flags = StopFlags(report.flags)
            if _is_checkpoint_due(report.step + 1, flags, settings):
                write_checkpoint(experiment, settings, writer)
            if flags.reason is not None:
                interruption.acknowledge(flags)
                break
    return flags


def _steps(
    experiment: Experiment,
    summaries: Summaries,
    num_steps: int,
    interruption: Interruption,
    writer: CheckpointWriter,
) -> Iterator[Report]:
    """Take steps, epoch after epoch, until `num_steps` have been taken in all."""

    def flags() -> StopFlags:
        # Asking all for a checkpoint tells them that the one before has failed.
        return interruption.flags() | (StopFlags.CHECKPOINT if writer.has_failed else StopFlags(0))

    while experiment.step.towers.step < num_steps:
        for batch in experiment.loader:
            with summaries.watch():
                report = experiment.step(batch, flags=flags)
            summaries.write(report, batch)
            yield report
            if experiment.step.towers.step >= num_steps:
                return


def _check_fresh(settings: Settings) -> None:
    if settings.fresh and may_restart():
        raise ConfigError(
            "--fresh together with torchrun's --max-restarts would start over at every restart: delete "
            f"{settings.run_dir} once, or choose another --run-dir"
        )


def _is_checkpoint_due(step: int, flags: StopFlags, settings: Settings) -> bool:
    """Say, alike on every worker, whether a checkpoint follows after `step` steps."""
    is_planned = step % settings.checkpoint_every == 0 or step == settings.steps
    return is_planned or StopFlags.CHECKPOINT in flags or flags.reason is not None


def _goodbye(step: int, flags: StopFlags) -> str:
    return (
        f"samestep: stopped after step {step} by {flags.reason}; checkpoint written; run the same command "
        "to continue\n"
    )
