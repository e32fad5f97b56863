"""The loop around a step: progress, checkpoints, and the figures at the end."""

from __future__ import annotations

import math
import shutil
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.app.evaluation import describe, evaluate
from samestep.app.experiment import Experiment, Settings
from samestep.app.interruption import Interruption, Wish
from samestep.app.lock import RunLock
from samestep.app.resume import resume, write_checkpoint
from samestep.app.run_folder import clear
from samestep.app.summaries import FOLDER, Summaries, Throughput, write_figures
from samestep.app.writer import CheckpointWriter
from samestep.errors import ConfigError
from samestep.identity import digest
from samestep.towers.report import Report
from samestep.towers.towers import Towers
from samestep.workers.first_worker import from_first_worker
from samestep.workers.job import Job, may_restart

__all__ = ["train"]


def train(settings: Settings, job: Job) -> int:
    """Train a recipe from its newest checkpoint, if there is one, to its last step.

    Prints the figures on the test examples and, last, `weights sha256 <hex>`. A signal or a time limit
    stops it earlier: after the same step on all workers, with a checkpoint, and without figures.

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
        _tell_placement(experiment, job)
    wishes = _train(experiment, settings, job, interruption)
    if wishes.reason is not None:
        if job.is_first:
            sys.stdout.flush()
            sys.stderr.write(_goodbye(experiment.step.towers.step, wishes))
        return wishes.exit_status
    figures = evaluate(experiment, job)
    if job.is_first:
        write_figures(settings.run_dir, experiment.step.towers.step, figures)
        print(describe(figures))
        print(f"weights sha256 {digest(experiment.model)}")
    return 0


def _start_over(settings: Settings) -> None:
    clear(settings.run_dir)
    shutil.rmtree(settings.run_dir / FOLDER, ignore_errors=True)
    (settings.run_dir / "settings.json").unlink(missing_ok=True)


def _train(experiment: Experiment, settings: Settings, job: Job, interruption: Interruption) -> Wish:
    """Take steps to the last one, or to the first after which a worker wishes to stop; return the wishes."""
    display = Display(settings, job, experiment.step.towers)
    summaries = Summaries(settings.run_dir, experiment, every=settings.summary_every)
    writer = CheckpointWriter(
        settings.run_dir, keep_last=settings.keep_checkpoints, keep_every=settings.keep_every
    )
    experiment.step.towers.wishes = interruption.wishes
    wishes = Wish(0)
    with interruption, display, summaries, writer:
        for report in _steps(experiment, summaries, settings.steps):
            display.show(report)
            writer.check()
            wishes = Wish(report.wishes)
            if _is_checkpoint_due(report.step + 1, wishes, settings):
                write_checkpoint(experiment, writer)
            if wishes.reason is not None:
                interruption.heed(wishes)
                break
    return wishes


def _steps(experiment: Experiment, summaries: Summaries, num_steps: int) -> Iterator[Report]:
    """Take steps, epoch after epoch, until `num_steps` have been taken in all."""
    while experiment.step.towers.step < num_steps:
        for batch in experiment.loader:
            with summaries.watch():
                report = experiment.step(batch)
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


def _is_checkpoint_due(step: int, wishes: Wish, settings: Settings) -> bool:
    """Say, alike on every worker, whether a checkpoint follows after `step` steps."""
    is_planned = step % settings.checkpoint_every == 0 or step == settings.steps
    return is_planned or Wish.CHECKPOINT in wishes or wishes.reason is not None


def _goodbye(step: int, wishes: Wish) -> str:
    return (
        f"samestep: stopped after step {step} by {wishes.reason}; checkpoint written; run the same command "
        "to go on\n"
    )


# ---- what is shown ---------------------------------------------------------------------------------


def _tell_placement(experiment: Experiment, job: Job) -> None:
    """Print one line for each worker, in order: where it is, and the towers that it runs."""
    towers = ", ".join(map(str, experiment.step.towers.placement.towers(job.rank)))
    device = str(job.device)
    if job.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(job.device)})"
    line = f"worker {job.rank} on {socket.gethostname()}, {device}, {job.threads} threads: towers {towers}"
    lines: list[Any] = [line]
    if job.world_size > 1:
        lines *= job.world_size
        dist.all_gather_object(lines, line)
    if job.is_first:
        print(*lines, sep="\n", flush=True)


class Display:
    """A line every `log_every` steps, above a progress bar on a terminal; silent but on the first worker."""

    def __init__(self, settings: Settings, job: Job, towers: Towers) -> None:
        first_step = towers.step
        self._settings = settings
        self._noise = towers.noise
        self._is_first = job.is_first
        self._throughput = Throughput()
        self._console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
        self._bar = Progress(
            TextColumn(settings.recipe),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} rows/s "),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (self._is_first and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=settings.steps, completed=first_step, loss="-", rate="-")
        self._tell_start(job, first_step)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, report: Report) -> None:
        """Show one more step."""
        if not self._is_first:
            return
        self._throughput.add(report.rows)
        step = report.step + 1
        self._bar.update(self._task, completed=step)
        if step % self._settings.log_every == 0 or step == self._settings.steps:
            rows_per_s, batch_s = self._throughput.read()
            self._bar.update(self._task, loss=f"{report.loss:.4f}", rate=f"{rows_per_s:,.0f}")
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S}: step {step}, loss = {report.loss:.2f} "
            line += f"({rows_per_s:.1f} rows/sec; {batch_s:.3f} sec/batch)"
            self._console.print(line, soft_wrap=True)
        if step % self._settings.summary_every == 0 or step == self._settings.steps:
            self._tell_noise()

    def _tell_noise(self) -> None:
        scale = self._noise.value
        if self._noise.is_settled and scale is not None and math.isfinite(scale):
            rounded = float(f"{scale:.2g}")  # it is an estimate
            line = f"noise scale {rounded:,.0f} rows: batches up to about that size pay off"
            self._console.print(line, soft_wrap=True)

    def _tell_start(self, job: Job, first_step: int) -> None:
        if not self._is_first:
            return
        settings = self._settings
        print(
            f"{settings.recipe}: {settings.towers} towers on {job.world_size} "
            f"worker{'s' * (job.world_size > 1)} ({job.device.type}), batches of {settings.batch_size} rows"
        )
        if first_step:
            print(f"{settings.run_dir} is at step {first_step} of {settings.steps}; --fresh starts over")
