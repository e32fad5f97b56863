"""The loop around a step: resume, progress, checkpoints, and the figures at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.checkpoint import all_checkpoints, checkpoint_path, keep_last, load, save
from samestep.digest import digest
from samestep.evaluation import describe, evaluate
from samestep.experiment import Experiment, Settings
from samestep.job import Job
from samestep.report import Report

__all__ = ["resume", "train"]

_KEPT_CHECKPOINTS = 3


def train(settings: Settings, job: Job) -> int:
    """Train a recipe from its newest checkpoint, if there is one, to its last step.

    Prints the figures on the test examples and, last, `weights sha256 <hex>`.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: the run folder holds another experiment.
    """
    if settings.fresh and job.is_first:
        shutil.rmtree(settings.run_dir / "checkpoints", ignore_errors=True)
        (settings.run_dir / "settings.json").unlink(missing_ok=True)
    job.barrier()
    settings.check_same_experiment()
    experiment = settings.build(job)
    resume(experiment, settings)
    if job.is_first:
        settings.write()
    with Display(settings, job, experiment.step.towers.step) as display:
        for report in _steps(experiment, settings.steps):
            display.show(report)
            if (report.step + 1) % settings.checkpoint_every == 0 or report.step + 1 == settings.steps:
                write_checkpoint(experiment, settings, job)
    figures = evaluate(experiment, job)
    if job.is_first:
        print(describe(figures))
        print(f"weights sha256 {digest(experiment.model)}")
    return 0


def _steps(experiment: Experiment, num_steps: int) -> Iterator[Report]:
    """Take steps, epoch after epoch, until `num_steps` have been taken in all."""
    while experiment.step.towers.step < num_steps:
        for batch in experiment.loader:
            yield experiment.step(batch)
            if experiment.step.towers.step >= num_steps:
                return


# ---- checkpoints -----------------------------------------------------------------------------------


def write_checkpoint(experiment: Experiment, settings: Settings, job: Job) -> None:
    """Write the state after the newest step, and let go of old ones."""
    if not job.is_first:
        return
    step = experiment.step
    save(
        checkpoint_path(settings.run_dir, step.towers.step),
        step=step.towers.step,
        model=experiment.model,
        average=None if step.average is None else step.average.module,
        **_parts(experiment),
        position=experiment.loader.position,
    )
    keep_last(settings.run_dir, _KEPT_CHECKPOINTS)


def resume(experiment: Experiment, settings: Settings) -> None:
    """Go on from the newest checkpoint in the run folder, if there is one."""
    found = all_checkpoints(settings.run_dir)
    if not found:
        return
    step = experiment.step
    average = None if step.average is None else step.average.module
    manifest = load(found[-1], model=experiment.model, average=average, **_parts(experiment))
    step.towers.step = manifest.step
    experiment.loader.position = manifest.step
    if step.average is not None:
        step.average.n_averaged.fill_(manifest.step)


def _parts(experiment: Experiment) -> dict[str, Any]:
    step = experiment.step
    return {"optimizer": step.optimizer, "scheduler": step.scheduler, "scaler": step.scaler}


# ---- what is shown ---------------------------------------------------------------------------------


@dataclass
class _Rate:
    """Rows a second of wall time, input included, since the last look."""

    rows: int = 0
    since_s: float = 0.0

    def look(self) -> float:
        now = time.perf_counter()
        rate = self.rows / (now - self.since_s)
        self.rows, self.since_s = 0, now
        return rate


class Display:
    """A progress bar on a terminal, plain lines elsewhere; silent on all workers but the first."""

    def __init__(self, settings: Settings, job: Job, first_step: int) -> None:
        self._settings = settings
        self._is_first = job.is_first
        self._rate = _Rate(since_s=time.perf_counter())
        self._console = Console(file=sys.stdout)
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
        self._rate.rows += report.rows
        self._bar.update(self._task, completed=report.step + 1)
        on_terminal = self._console.is_terminal
        every = max(1, self._settings.log_every // 10) if on_terminal else self._settings.log_every
        if (report.step + 1) % every == 0 or report.step + 1 == self._settings.steps:
            rate = f"{self._rate.look():,.0f}"
            self._bar.update(self._task, loss=f"{report.loss:.4f}", rate=rate)
            if not on_terminal:
                print(f"step {report.step + 1}  loss {report.loss:.4f}  {rate} rows/s", flush=True)

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
