"""`samestep eval`: metrics of a run's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from samestep.app.evaluation import line_of
from samestep.app.loggers.json_lines import read_last_line
from samestep.app.loggers.tensorboard import write_metrics
from samestep.app.run_folder import Search, all_checkpoints, find_newest, print_damaged, search
from samestep.app.settings import Settings, trainer_of
from samestep.checkpoint.durable import storage
from samestep.checkpoint.files import Found
from samestep.checkpoint.folder import Folder
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import restore
from samestep.errors import ConfigError
from samestep.workers.agreement import from_first_worker
from samestep.workers.job import Job

__all__ = ["evaluate_run"]

Weights = Literal["average", "raw"]

_POLL_S = 1.0


def evaluate_run(settings: Settings, job: Job, *, weights: Weights = "average", follow: bool = False) -> None:
    """Evaluate a run's newest checkpoint, print the metrics and write them for TensorBoard.

    Args:
        settings: the settings of the run.
        job: the job; all its workers must call this.
        weights: evaluate the moving averages of the weights, if the run keeps them, or the raw weights.
        follow: also evaluate each new checkpoint, until that of the run's last step: of `settings.steps`, or
            earlier if the run was ended by `Trainer.stop`.

    Raises:
        MissingFileError: there is no checkpoint, and `follow` is not set.
        ConfigError: the recipe has no evaluation.
        DataError: no checkpoint is whole, and `follow` is not set; or one does not fit the model.
    """
    trainer = trainer_of(settings, job)
    if trainer.evaluate is None:
        raise ConfigError(
            f"{settings.recipe}: has nothing to evaluate: pass evaluate=samestep.Evaluation(...) to its "
            "trainer"
        )
    average = trainer.step.averaged_model
    model = trainer.model if weights == "raw" or average is None else average.module
    objects = TrainingObjects(model=trainer.model, averaged_model=average)
    newest = from_first_worker(job, lambda: find_newest(settings.run_dir)) if not follow else None
    for found in [newest] if newest is not None else _checkpoints(settings, job):
        restore(found.snapshot, objects, found.path, job)
        metrics = trainer.evaluate(model, job)
        if job.is_first:
            print(line_of(found.manifest.step, metrics), flush=True)
            write_metrics(settings.run_dir, found.manifest.step, metrics)


def _checkpoints(settings: Settings, job: Job) -> Iterator[Found]:
    """Yield the newest whole checkpoint whenever a new one appears, up to that of the last step."""
    step, refused = -1, set[Path]()
    if job.is_first and not all_checkpoints(settings.run_dir):
        print(f"{settings.run_dir}: no checkpoint yet; waiting for the first", flush=True)
    with storage(settings.run_dir, "read"):
        held = Folder.open(settings.run_dir) if job.is_first else None
    while step < settings.steps:
        # Worker 0 looks for all. All ask it once a second, so no collective runs into the timeout.
        look = partial(_look, settings.run_dir, step, refused, held)
        result, is_done = from_first_worker(job, look)
        refused.update(path for path, _ in result.damaged)
        if job.is_first:
            print_damaged(result)
        if result.found is None:
            if is_done:
                return
            time.sleep(_POLL_S)
            continue
        step = result.found.manifest.step
        yield result.found


def _look(run_dir: Path, step: int, refused: set[Path], held: Folder | None) -> tuple[Search, bool]:
    """Search for a newer checkpoint; return also whether the run ended at `step`, so that none will come."""
    last: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        last = read_last_line(run_dir) or {}
    is_done = (last.get("event"), last.get("reason"), last.get("step")) == ("end", "done", step)
    return search(run_dir, newer_than=step, refused=refused, held=held), is_done
