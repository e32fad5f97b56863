"""`samestep.save` and `samestep.load`: the state of a run as a folder, for any number of workers."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor, nn

from samestep.arguments import check_kind, whole
from samestep.checkpoint.files import Found, read, write
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.objects import GlobalGenerators, TrainingObjects
from samestep.checkpoint.snapshot import restore, take_snapshot
from samestep.data.loader import TowerLoader
from samestep.data.stream_loader import StreamLoader
from samestep.errors import ConfigError, DamagedError
from samestep.towers.towers import Towers
from samestep.workers.agreement import agree, from_first_worker
from samestep.workers.default_group import has_group
from samestep.workers.job import Job

__all__ = ["load", "save"]


def save(  # noqa: PLR0913 - what a run's state consists of
    path: str | Path,
    *,
    model: nn.Module,
    towers: Towers | None = None,
    loader: TowerLoader | StreamLoader | None = None,
    averaged_model: nn.Module | None = None,
    step: int | None = None,
    rng: bool = False,
    **state: Any,
) -> Path:
    """Write a checkpoint atomically: under a temporary name, flushed to disk, then renamed.

    Call it on all workers, between two steps. Worker 0 writes and the others wait; an error on worker 0 is
    raised on all.

    Args:
        path: the folder to write; an existing checkpoint there is replaced atomically.
        model: its `state_dict` is written as safetensors.
        towers: their step and noise scale are saved; `load` refuses another T or seed. Required in a job of
            several workers.
        loader: its position is saved; `load` refuses another batch size, seed, number of examples, ...
        averaged_model: torch's `AveragedModel` itself, or another module with the averages.
        step: steps taken, by default 0. Only without `towers`, which count their steps.
        rng: save the states of the process's global generators (torch's, Python's and NumPy's legacy one),
            for a loop that draws from them outside the towers' passes, such as for its batches. All workers
            must have them in the same state.
        state: optimizers, schedulers and anything else with a `state_dict`, or plain numbers, strings,
            tensors, and lists, tuples and dicts of them; None is left out.

    Returns:
        The folder.

    Raises:
        ConfigError: some of the state cannot be written, both `step` and `towers` are passed, `path` has no
            last part, or `towers` is missing in a job of several workers.
        DisagreementError: the workers' weights differ, or their averages or other modules, or, with `rng`,
            their generators' states.
        UsageError: a step is open.
        StorageError: the checkpoint cannot be written, or `path` holds something other than a checkpoint, a
            link or an empty folder, which is left as it is.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> path = save(Path(tempfile.mkdtemp()) / "one", model=model, step=7, best=0.5)
        >>> sorted(file.name for file in path.iterdir())
        ['manifest.json', 'model.safetensors', 'training.json', 'training.safetensors']
        >>> manifest = load(path, model=model)
        >>> manifest.step, manifest.state
        (7, {'best': 0.5})
    """
    path = _checked(path, model, towers, averaged_model)
    objects = TrainingObjects(
        model=model, towers=towers, loader=loader, averaged_model=averaged_model, rng=rng, state=state
    )
    if towers is not None and isinstance(loader, TowerLoader | StreamLoader):
        loader._progress.expect_steps()
    for each in (loader, *state.values()):
        if isinstance(each, TowerLoader | StreamLoader):
            each._progress.check_used()
    if towers is None:
        if has_group():
            raise ConfigError("towers is missing: there are several workers, so pass towers=")
        number = whole("step", 0 if step is None else step, 0)
        return write(take_snapshot(objects.gathered(), number), path)
    if step is not None:
        raise ConfigError(f"step = {step} was passed with towers, which know the step: leave step out")
    towers._check_no_step(f"save {path}")
    for each, beside in objects.compared:
        each._check_weights(f"saving a checkpoint ({path})", beside)
    if rng:
        _check_generators(towers.job, path)
    what, objects = f"saving a checkpoint ({path})", objects.gathered()
    return from_first_worker(towers.job, lambda: write(take_snapshot(objects), path), what)


def load(
    path: str | Path,
    *,
    model: nn.Module,
    towers: Towers | None = None,
    loader: TowerLoader | StreamLoader | None = None,
    averaged_model: nn.Module | None = None,
    rng: bool = False,
    **state: Any,
) -> Manifest:
    """Load a checkpoint into the objects: all of its state or, on an error, nothing.

    Call it on all workers; their number may differ from when it was saved. With `towers`, worker 0 reads the
    files for all. Without, each process reads them by itself, for example to start from the weights of
    another run before `Towers` are created.

    Args:
        path: the checkpoint's folder.
        model: gets the weights.
        towers: get the step and the noise scale; T and the seed must be the same.
        loader: gets the position; batch size, seed, number of examples, ... must be the same.
        averaged_model: gets the averages; an `AveragedModel` also gets the number of updates.
        rng: restore the states of the process's global generators.
        state: the objects with a `load_state_dict` to load into, by the names they were saved under.

    Returns:
        The checkpoint's manifest; its `state` has what was saved under names not passed here.

    Raises:
        MissingFileError: there is no checkpoint.
        DamagedError: its files are not what was written.
        DataError: it does not fit the objects or the memory, or its format is newer.
        ConfigError: it is from a run with other settings.
        DisagreementError: it does not fit the objects of another worker.
        UsageError: a step is open.
        StorageError: it cannot be read.

    Example:
        >>> import tempfile
        >>> towers = Towers(nn.Linear(2, 1), 4)
        >>> path = save(tempfile.mkdtemp(), model=towers.model, towers=towers, epoch=3)
        >>> load(path, model=towers.model, towers=towers).state["epoch"]
        3
    """
    path = _checked(path, model, towers, averaged_model)
    objects = TrainingObjects(
        model=model, towers=towers, loader=loader, averaged_model=averaged_model, rng=rng, state=state
    )
    if towers is not None:
        towers._check_no_step(f"load {path}")
    job = None if towers is None else towers.job
    what = f"loading a checkpoint ({path})"
    found = _read(path) if job is None else from_first_worker(job, lambda: _read(path), what)
    left = restore(found.snapshot, objects, path, job)
    return replace(found.manifest, state=left)


def _checked(path: object, model: object, towers: object, averaged_model: object) -> Path:
    """Return the path, after checking the types of what `save` and `load` share."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path is a {type(path).__name__}: expected the path of the checkpoint's folder")
    check_kind("model", model, nn.Module, "an nn.Module, not its state_dict")
    check_kind("towers", towers, (Towers, NoneType), "the samestep.Towers of the model")
    check_kind("averaged_model", averaged_model, (nn.Module, NoneType), "a module with the averages")
    return Path(path)


def _read(path: Path) -> Found:
    try:
        return read(path)
    except DamagedError as error:
        raise DamagedError(f"{error}; use another checkpoint") from error


def _check_generators(job: Job, path: Path) -> None:
    """Check that all workers' global generators are in the same state."""
    names = {"torch": "torch's CPU generator", "device": f"torch's generator on {job.device.type}"}
    names |= {"python": "Python's random", "numpy": "NumPy's generator"}
    states = GlobalGenerators(job.device).state_dict()
    agree(
        job,
        {names[name]: f"state {_hash(state)}" for name, state in states.items()},
        where=f"saving a checkpoint ({path}) with rng=True: all workers must have drawn the same numbers",
    )


def _hash(state: Any) -> str:
    values = [
        v.tolist() if isinstance(v, Tensor) else v for v in (state if isinstance(state, list) else [state])
    ]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]
