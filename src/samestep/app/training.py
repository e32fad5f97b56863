"""The loop around a step: resume, progress, checkpoints, and the metrics at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.optim.swa_utils import AveragedModel

from samestep.app.display import Display, print_placement
from samestep.app.evaluation import describe, evaluate
from samestep.app.experiment import Experiment
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.lock import RunLock
from samestep.app.run_folder import clear, newest_whole, set_aside, tidy
from samestep.app.settings import Settings
from samestep.app.summaries import FOLDER, Summaries, write_metrics
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.snapshot import Parts, check_fits, restore, take_snapshot
from samestep.errors import ConfigError, Error
from samestep.identity import Fingerprint, changes, digest, fingerprint
from samestep.towers.report import Report
from samestep.workers.agreement import agree, from_first_worker
from samestep.workers.environment import may_restart
from samestep.workers.job import Job

__all__ = ["resume", "train"]


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
        StorageError: the disk does not take a checkpoint.
    """
    _check_fresh(settings)
    interruption = Interruption(
        job, max_seconds=settings.max_seconds, checkpoint_minutes=settings.checkpoint_minutes
    )
    with RunLock(settings.run_dir, job):
        return _run(settings, job, interruption)


def _run(settings: Settings, job: Job, interruption: Interruption) -> int:
    if settings.fresh:
        from_first_worker(job, lambda: _start_over(settings))
    settings.check_same_experiment()
    experiment = settings.build(job)
    resume(experiment, settings)
    if job.is_first:
        settings.write()
    if settings.log_device_placement:
        print_placement(experiment.step.towers)
    flags = _train(experiment, settings, job, interruption)
    if flags.reason is not None:
        if job.is_first:
            sys.stdout.flush()
            sys.stderr.write(_goodbye(experiment.step.towers.step, flags))
        return flags.exit_status
    metrics = evaluate(experiment, job)
    if job.is_first:
        write_metrics(settings.run_dir, experiment.step.towers.step, metrics)
        print(describe(metrics))
        print(f"weights sha256 {digest(experiment.model)}")
    return 0


def _start_over(settings: Settings) -> None:
    clear(settings.run_dir)
    shutil.rmtree(settings.run_dir / FOLDER, ignore_errors=True)
    (settings.run_dir / "settings.json").unlink(missing_ok=True)


def _train(experiment: Experiment, settings: Settings, job: Job, interruption: Interruption) -> StopFlags:
    """Take steps to the last one, or until any worker has to stop; return the stop flags."""
    display = Display(settings, job, experiment.step.towers)
    summaries = Summaries(settings.run_dir, experiment, every=settings.summary_every)
    writer = CheckpointWriter(
        settings.run_dir, keep_last=settings.keep_checkpoints, keep_every=settings.keep_every
    )
    flags = StopFlags(0)
    with interruption, display, summaries, writer:
        for report in _steps(experiment, summaries, settings.steps, interruption):
            display.show(report)
            writer.check()
            flags = StopFlags(report.flags)
            if _is_checkpoint_due(report.step + 1, flags, settings):
                write_checkpoint(experiment, writer)
            if flags.reason is not None:
                interruption.acknowledge(flags)
                break
    return flags


def _steps(
    experiment: Experiment, summaries: Summaries, num_steps: int, interruption: Interruption
) -> Iterator[Report]:
    """Take steps, epoch after epoch, until `num_steps` have been taken in all."""
    while experiment.step.towers.step < num_steps:
        for batch in experiment.loader:
            with summaries.watch():
                report = experiment.step(batch, flags=interruption.flags)
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
        "to go on\n"
    )


# ---- checkpoints -----------------------------------------------------------------------------------


def write_checkpoint(experiment: Experiment, writer: CheckpointWriter) -> None:
    """Take a snapshot of the state after the newest step, and have it written while training goes on."""
    towers = experiment.step.towers
    if towers.job.is_first:  # all have the same state
        writer.wait()  # before the copy, so that there is never more than one
        writer.write(take_snapshot(towers.step, _parts(experiment)))


def resume(experiment: Experiment, settings: Settings) -> None:
    """Go on from the newest whole checkpoint in the run folder, if it ever had one.

    Worker 0 reads it for all. Damaged ones are named and set aside, once the whole one is known to fit.

    Raises:
        ConfigError: it is of another experiment.
        DataError: it does not fit, or there are checkpoints but none is whole.
        StorageError: the disk does not give it.
    """
    job = experiment.step.towers.job
    result = from_first_worker(job, lambda: newest_whole(settings.run_dir))
    found, parts = result.found, _parts(experiment)
    if found is not None:
        error: Error | None = None
        try:
            check_fits(found.snapshot, parts, found.path)
        except Error as misfit:
            error = misfit
        agree(job, {}, where=str(found.path), error=error)
        restore(found.snapshot, parts, found.path)
        _tell_changes(found.snapshot.fingerprint, job, found.path)
    if job.is_first:
        set_aside(result)
        tidy(settings.run_dir)


def _tell_changes(before: Fingerprint, job: Job, path: Path) -> None:
    differences = changes(before, fingerprint(job.device))
    if job.is_first and differences:
        line = f"samestep: {path}: {'; '.join(differences)}: the bits may differ from here on"
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _NumAveraged:
    """How many updates the moving averages have seen, which their module does not hold."""

    average: AveragedModel

    def state_dict(self) -> dict[str, int]:
        return {"num_averaged": int(self.average.n_averaged)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.average.n_averaged.fill_(state["num_averaged"])


def _parts(experiment: Experiment) -> Parts:
    step = experiment.step
    average = step.averaged_model
    return Parts(
        experiment.model,
        None if average is None else average.module,
        step.towers,
        experiment.loader,
        {
            "optimizer": step.optimizer,
            "scheduler": step.scheduler,
            "scaler": step.scaler,
            "noise": step.towers.noise,
            "num_averaged": None if average is None else _NumAveraged(average),
        },
    )
