"""Checkpoints of a run's state, and resuming from the newest one."""

from __future__ import annotations

import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.app.lock import RunLock
from samestep.app.loggers.json_lines import FILE as METRICS
from samestep.app.loggers.tensorboard import delete_summaries
from samestep.app.loggers.wandb import ID_FILE
from samestep.app.run_folder import Search, clear, newest_whole, set_aside, tidy
from samestep.app.settings import Settings, is_plain
from samestep.app.small_states import copied, set_small_state, small_state
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.durable import storage
from samestep.checkpoint.objects import TrainingObjects, kind_of
from samestep.checkpoint.snapshot import check_snapshot, restore, take_snapshot
from samestep.checkpoint.switches import Switches
from samestep.errors import ConfigError, DataError, shown
from samestep.identity import Fingerprint, changes, fingerprint
from samestep.streams import GlobalStreams
from samestep.workers.agreement import agree, from_first_worker
from samestep.workers.environment import may_restart
from samestep.workers.job import Job

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = [
    "check_checkpoint",
    "check_fresh",
    "objects_of",
    "open_run",
    "put_back",
    "resume",
    "small_states",
    "write_checkpoint",
]

_GENERATORS, _SWITCHES = "generators", "switches"
_SETTINGS = "settings"
_DECIDING = ("steps", "evaluate_every", "checkpoint_every", "fresh")
"""Options that decide when all workers act together; they must be the same on all. Worker 0 uses the rest."""
_MUST_MATCH = "must_match"
"""Names in a checkpoint of a recipe's settings, and of other values that the run must be resumed with."""


def check_fresh(trainer: Trainer) -> None:
    """Raise a `ConfigError` if each restart by the launcher would start over and delete checkpoints."""
    if trainer.fresh and may_restart():
        raise ConfigError(
            "--fresh together with torchrun's --max-restarts would start over at every restart: delete "
            f"{trainer.run_dir} once, or choose another --run-dir"
        )


def open_run(trainer: Trainer, lock: RunLock) -> None:
    """Prepare the run folder, load the newest checkpoint, and write the settings; see `resume`."""
    job, settings = trainer.job, trainer.settings
    _compare_options(trainer)
    if trainer.fresh:
        from_first_worker(job, lambda: _start_over(lock))
    if settings is not None:
        from_first_worker(job, settings.check_same_experiment)
    resume(trainer, lock)
    if settings is not None:
        from_first_worker(job, lambda: _note(settings, lock))


def _compare_options(trainer: Trainer) -> None:
    """Check that all workers have the same options, so that they act at the same steps."""
    options: dict[str, Any] = {name: getattr(trainer, name) for name in _DECIDING}
    options["evaluate"] = None if trainer.evaluate is None else type(trainer.evaluate).__name__
    options["must_match"] = {name: repr(value) for name, value in sorted(_must_match(trainer).items())}
    agree(trainer.job, options, where="Trainer")


def _start_over(lock: RunLock) -> None:
    folder, names = lock.folder, ("settings.json", METRICS, ID_FILE)
    for name in names:
        found = folder.look(name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise DataError(f"{folder.path / name}: is a folder, expected a file; move it away")
    clear(lock.checkpoints)
    delete_summaries(lock.run_dir)
    with storage(lock.run_dir, "deleted"):
        for name in names:
            folder.unlink(name)


def _note(settings: Settings, lock: RunLock) -> None:
    lock.check()
    settings.write()


def write_checkpoint(trainer: Trainer, writer: CheckpointWriter) -> None:
    """Take a snapshot of the state after the newest step, to be written while training continues.

    Raises:
        DisagreementError: workers have different weights, of which only worker 0's would be written.
    """
    objects = replace(objects_of(trainer, _noted(trainer)), rng=_has_drawn(trainer))
    for towers, beside in objects.compared:
        towers._check_weights(f"step {towers.step}, checkpoint", beside)
    gathered = objects.gathered()
    writer.write(trainer.step.towers.step, lambda: take_snapshot(gathered))


def check_checkpoint(trainer: Trainer) -> None:
    """Raise now, not hours later, what `write_checkpoint` would raise for state that it cannot write."""
    check_snapshot(objects_of(trainer, _noted(trainer)))


def _has_drawn(trainer: Trainer) -> bool:
    """Whether anything has drawn from the global generators since the run began.

    If not, checkpoints leave the generators out: the script seeds them in the same way when it runs again.
    """
    start = trainer._from_generators
    return start is None or start.has_changed()


def small_states(trainer: Trainer) -> dict[str, Any]:
    """Return copies of the states that change before a step is taken.

    They are those of loader and callbacks, the options of the optimizer's groups, the layers' modes, which
    parameters are trained, and the generators.
    """
    states = {name: copied(small_state(each)) for name, each in _small(trainer).items()}
    generators = GlobalStreams.capture(trainer.job.device)
    return {**states, _SWITCHES: Switches.now(objects_of(trainer)), _GENERATORS: generators}


def put_back(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Restore the states that `small_states` returned."""
    for name, each in _small(trainer).items():
        set_small_state(each, states[name])
    states[_SWITCHES].restore()
    states[_GENERATORS].restore()


def _small(trainer: Trainer) -> dict[str, Any]:
    return {"loader": trainer.loader, "optimizer": trainer.step.optimizer, **_callbacks(trainer)}


def resume(trainer: Trainer, lock: RunLock) -> None:
    """Load the newest whole checkpoint in the run folder; do nothing if the run never had a checkpoint.

    Worker 0 reads the checkpoint for all workers. Newer, damaged checkpoints are reported and renamed once
    the whole one has been loaded.

    Raises:
        ConfigError: the checkpoint belongs to another experiment.
        DataError: the checkpoint does not fit the objects, there are checkpoints but none is whole, or the
            run's checkpoints are gone.
        StorageError: the checkpoint cannot be read.
    """
    job, run_dir = trainer.job, lock.run_dir
    result = from_first_worker(
        job, lambda: newest_whole(run_dir), f"loading the newest checkpoint ({run_dir})"
    )
    if result.found is not None:
        snapshot, path = result.found.snapshot, result.found.path
        _check_same(trainer, snapshot.sections()["state"], path)
        has_generators = "rng" in snapshot.sections()["own"]
        restore(snapshot, replace(objects_of(trainer), rng=has_generators), path, job)
        trainer._from_generators = None if has_generators else trainer._from_generators
        _warn_of_changes(snapshot.fingerprint, job, path)
    from_first_worker(job, lambda: _put_in_order(result, lock))


def _put_in_order(result: Search, lock: RunLock) -> None:
    set_aside(result, lock.checkpoints)
    tidy(lock.checkpoints)


def objects_of(trainer: Trainer, noted: Mapping[str, Any] | None = None) -> TrainingObjects:
    """Return the objects of a run's state; for a checkpoint, also `noted`, see `_noted`."""
    step = trainer.step
    return TrainingObjects(
        model=trainer.model,
        towers=step.towers,
        loader=trainer.loader,
        averaged_model=step.averaged_model,
        rng=True,  # callbacks and a user's own loader may draw random numbers
        state={
            **{"optimizer": step.optimizer, "scheduler": step.scheduler, "scaler": step.scaler},
            **_callbacks(trainer),
            **(noted or {}),
        },
    )


def _callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks that have a state, by their names in a checkpoint."""
    stateful = [callback for callback in trainer.callbacks if hasattr(callback, "state_dict")]
    callbacks = {f"callback {type(callback).__name__}": callback for callback in stateful}
    if len(callbacks) < len(stateful):
        raise ConfigError("callbacks: two of them have a state and the same class; derive a class for each")
    return callbacks


def _noted(trainer: Trainer) -> dict[str, Any]:
    """Return the values that a checkpoint keeps because the run must be resumed with the same ones."""
    settings = {} if trainer.settings is None else {_SETTINGS: trainer.settings.must_match()}
    return {**settings, _MUST_MATCH: _must_match(trainer)}


def _must_match(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's `must_match` and the optimizer's defaults.

    The defaults are compared because loading a checkpoint would silently replace those of the script.
    """
    optimizer = trainer.step.optimizer
    plain = {f"optimizer's {name}": value for name, value in optimizer.defaults.items() if is_plain(value)}
    return {**trainer.must_match, "optimizer": kind_of(optimizer), **plain}


def _check_same(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    if trainer.settings is not None:
        trainer.settings.check_same(state.get(_SETTINGS))
    earlier = state.get(_MUST_MATCH)
    if not isinstance(earlier, dict):  # a forged checkpoint
        return
    for name, now in _must_match(trainer).items():
        before = earlier.get(name, now)
        if not (is_plain(before) and before == now):
            raise ConfigError(
                f"{path}: was trained with {name} = {shown(before)}, not {shown(now)}: use the same value, "
                "or start a new run in another folder"
            )


def _warn_of_changes(before: Fingerprint, job: Job, path: Path) -> None:
    differences = changes(before, fingerprint(job.device))
    if job.is_first and differences:
        line = f"samestep: {path}: {'; '.join(differences)}: the bits may differ from here on"
        print(line, file=sys.stderr, flush=True)
