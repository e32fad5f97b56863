"""Checkpoints: the state of a run as a folder, free of placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from samestep.checkpoint.files import read, write
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.snapshot import Parts, restore, take_snapshot
from samestep.data.loader import TowerLoader
from samestep.errors import DamagedError
from samestep.towers.towers import Towers

__all__ = ["load", "save"]


def save(
    path: str | Path,
    *,
    step: int,
    model: nn.Module,
    average: nn.Module | None = None,
    towers: Towers | None = None,
    loader: TowerLoader | None = None,
    **state: Any,
) -> Path:
    """Write a checkpoint: under a temporary name, flushed to disk, then renamed.

    Call it on one worker; all have the same state.

    Args:
        path: the folder to write; one that is there already is replaced.
        step: steps taken.
        model: its `state_dict` is written as safetensors.
        average: a second module to write the same way, such as an `AveragedModel`'s `module`.
        towers: T and the seed are noted, and `load` refuses others.
        loader: its position is noted, with batch size, seed and number of examples.
        state: optimizers, schedulers and anything else with a `state_dict`, or plain numbers, strings,
            tensors, and lists, tuples and dicts of them; None is left out.

    Returns:
        The folder.

    Raises:
        ConfigError: some of the state cannot be written.
        StorageError: the disk does not take it; what was at `path` before is still there.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> path = save(Path(tempfile.mkdtemp()) / "one", step=7, model=model, best=0.5)
        >>> sorted(file.name for file in path.iterdir())
        ['manifest.json', 'model.safetensors', 'training.json', 'training.safetensors']
        >>> manifest = load(path, model=model)
        >>> manifest.step, manifest.state
        (7, {'best': 0.5})
    """
    return write(take_snapshot(step, Parts(model, average, towers, loader, state)), Path(path))


def load(
    path: str | Path,
    *,
    model: nn.Module,
    average: nn.Module | None = None,
    towers: Towers | None = None,
    loader: TowerLoader | None = None,
    **state: Any,
) -> Manifest:
    """Read a checkpoint back into the objects it was written from: all of it, or, on an error, nothing.

    Call it on every worker.

    Args:
        path: the folder.
        model: gets the weights.
        average: gets the moving averages.
        towers: get the step, if T and the seed are the same.
        loader: gets the position, if batch size, seed and number of examples are the same.
        state: the objects with a `load_state_dict` to fill, by the names they were saved under.

    Raises:
        MissingFileError: there is no checkpoint.
        DamagedError: it is not what was written.
        DataError: it does not fit the objects, or is of a newer format.
        ConfigError: it is of another experiment.
        StorageError: the disk does not give it.
    """
    path = Path(path)
    try:
        found = read(path)
    except DamagedError as error:
        raise DamagedError(f"{error}; use another checkpoint") from error
    left = restore(found.snapshot, Parts(model, average, towers, loader, state), path)
    return replace(found.manifest, state=left)
