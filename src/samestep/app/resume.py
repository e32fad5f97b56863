"""Between a run and its folder: checkpoints of its state, and the newest one at the next start."""

from __future__ import annotations

import sys
from pathlib import Path

from samestep.app.experiment import Experiment
from samestep.app.lock import RunLock
from samestep.app.run_folder import Search, newest_whole, set_aside, tidy
from samestep.app.settings import Settings
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import restore, take_snapshot
from samestep.identity import Fingerprint, changes, fingerprint
from samestep.workers.agreement import from_first_worker
from samestep.workers.job import Job

__all__ = ["resume", "write_checkpoint"]

_SETTINGS = "settings"
"""Names, in a checkpoint, the settings that its numbers depend on."""


def write_checkpoint(experiment: Experiment, settings: Settings, writer: CheckpointWriter) -> None:
    """Take a snapshot of the state after the newest step, and have it written while training continues."""
    writer.write(experiment.step.towers.step, lambda: take_snapshot(_objects(experiment, settings)))


def resume(experiment: Experiment, settings: Settings, lock: RunLock) -> None:
    """Continue from the newest whole checkpoint in the run folder, if it ever had one.

    Worker 0 reads it for all. Damaged ones are named and set aside, once the whole one has been loaded.

    Raises:
        ConfigError: it is of another experiment.
        DataError: it does not fit, or there are checkpoints but none is whole.
        StorageError: the disk does not give it.
    """
    job = experiment.step.towers.job
    result = from_first_worker(
        job, lambda: newest_whole(settings.run_dir), f"{settings.run_dir}, where worker 0 reads a checkpoint"
    )
    if result.found is not None:
        snapshot, path = result.found.snapshot, result.found.path
        settings.check_same(snapshot.sections()["state"].get(_SETTINGS))
        restore(snapshot, _objects(experiment), path, job)
        _warn_of_changes(snapshot.fingerprint, job, path)
    from_first_worker(job, lambda: _put_in_order(result, lock))


def _put_in_order(result: Search, lock: RunLock) -> None:
    set_aside(result, lock.checkpoints)
    tidy(lock.checkpoints)


def _objects(experiment: Experiment, settings: Settings | None = None) -> TrainingObjects:
    step = experiment.step
    noted = {} if settings is None else {_SETTINGS: settings.must_match()}
    return TrainingObjects(
        model=experiment.model,
        towers=step.towers,
        loader=experiment.loader,
        averaged_model=step.averaged_model,
        state={"optimizer": step.optimizer, "scheduler": step.scheduler, "scaler": step.scaler, **noted},
    )


def _warn_of_changes(before: Fingerprint, job: Job, path: Path) -> None:
    differences = changes(before, fingerprint(job.device))
    if job.is_first and differences:
        line = f"samestep: {path}: {'; '.join(differences)}: the bits may differ from here on"
        print(line, file=sys.stderr, flush=True)
