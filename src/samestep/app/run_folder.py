"""The checkpoints of a run: which there are, the newest whole one, and what becomes of the others.

    RUN_DIR/checkpoints/step-00001000               a checkpoint
    RUN_DIR/checkpoints/.step-00001000.unfinished   one that is being written, or a killed run was writing
    RUN_DIR/checkpoints/step-00001000.damaged       one that was set aside

Only the process that holds the run's lock renames or deletes; reading needs no lock.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch.utils import _pytree as pytree

from samestep.checkpoint.durable import storage
from samestep.checkpoint.files import Found, read
from samestep.checkpoint.folder import Folder
from samestep.checkpoint.manifest import MANIFEST
from samestep.checkpoint.replacement import replaced_name
from samestep.errors import DamagedError, DataError, MissingFileError

__all__ = [
    "Search",
    "all_checkpoints",
    "checkpoint_path",
    "clear",
    "find_newest",
    "newest_whole",
    "print_damaged",
    "prune",
    "read_digest",
    "search",
    "set_aside",
    "tidy",
]

_NAME = re.compile(r"step-[0-9]{8,}")
_SET_ASIDE = re.compile(r"step-[0-9]{8,}\.damaged(-[0-9]+)?")
_LEFT_BEHIND = re.compile(r"\.step-[0-9]{8,}\.(unfinished|deleted)")


@dataclass(frozen=True)
class Search:
    """What a run folder holds.

    Attributes:
        found: the newest whole checkpoint; None where there is none.
        damaged: those newer than it, newest first, and what is wrong with each.
    """

    found: Found | None
    damaged: tuple[tuple[Path, str], ...]


pytree.register_dataclass(Search)  # so that workers can send each other its tensors


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return _folder(run_dir) / f"step-{step:08d}"


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, oldest first."""
    return [_folder(run_dir) / name for name in _by_step(path.name for path in _entries(run_dir))]


def search(
    run_dir: Path,
    *,
    newer_than: int = -1,
    refused: Container[Path] = (),
    held: Folder | None = None,
) -> Search:
    """Look for the newest whole checkpoint of a run; nothing is changed.

    Args:
        run_dir: the folder of the run.
        newer_than: leave out those of this step and before.
        refused: leave these out.
        held: the run's folder, open since it was first looked at.

    Raises:
        DataError: the newest is of a newer format.
        MissingFileError: the path no longer leads to the folder that is held.
        StorageError: it cannot be read.
    """
    if held is not None and not held.is_there():
        raise MissingFileError(f"{run_dir}: was moved, deleted or replaced; name the run folder again")
    damaged: list[tuple[Path, str]] = []
    for path in reversed(all_checkpoints(run_dir)):
        if _step(path.name) <= newer_than or path in refused:
            continue
        try:
            found = read(path)
            if found.manifest.step != _step(path.name):
                raise DamagedError(f"{path}: holds step {found.manifest.step}")
            return Search(found, tuple(damaged))
        except (DamagedError, MissingFileError) as error:
            if not os.path.lexists(path):  # the run has deleted it just now, so it has newer ones
                return search(run_dir, newer_than=newer_than, refused=refused, held=held)
            damaged.append((path, str(error)))
    return Search(None, tuple(damaged))


def newest_whole(run_dir: Path) -> Search:
    """Look for the newest whole checkpoint of a run that has some, or had.

    Returns:
        With `found` None if there never was one.

    Raises:
        DataError: there are checkpoints, set aside or not, but none is whole.
    """
    result = search(run_dir)
    aside = [path for path in _entries(run_dir) if _SET_ASIDE.fullmatch(path.name)]
    if result.found is None and (result.damaged or aside):
        _print(f"{reason}; not used" for _, reason in result.damaged)
        raise DataError(
            f"{run_dir}: none of its {len(result.damaged) + len(aside)} checkpoints is whole: restore one, "
            "choose another --run-dir, or start over with --fresh"
        )
    return result


def read_digest(path: Path) -> str:
    """Return the digest of the weights in a checkpoint, or in the newest whole one of a run."""
    replaced = path.parent / replaced_name(path.name)
    if os.path.lexists(path / MANIFEST) or (os.path.lexists(replaced) and not os.path.lexists(path)):
        return read(path).manifest.digest
    return find_newest(path).manifest.digest


def find_newest(run_dir: Path) -> Found:
    """Return the newest whole checkpoint of a run, naming those that are not; nothing is changed.

    Raises:
        MissingFileError: there is none.
    """
    result = newest_whole(run_dir)
    if result.found is None:
        raise MissingFileError(f"{run_dir}: has no checkpoint; train first, or name another run folder")
    print_damaged(result)
    return result.found


def print_damaged(result: Search) -> None:
    """Name the damaged checkpoints that were passed over."""
    _print(f"{reason}; not used" for _, reason in result.damaged)


def set_aside(result: Search, checkpoints: Folder) -> None:
    """Name the damaged checkpoints that were passed over, and rename them."""
    for path, reason in result.damaged:
        with storage(path, "renamed"):
            names = (f"{path.name}.damaged{f'-{n}' * (n > 1)}" for n in count(1))
            free = next(name for name in names if checkpoints.look(name) is None)
            checkpoints.rename(path.name, free)
        _print([f"{reason}; set aside as {free}"])


def tidy(checkpoints: Folder) -> None:
    """Delete what a killed run was in the middle of writing or deleting."""
    for name in checkpoints.names():
        if _LEFT_BEHIND.fullmatch(name):
            with suppress(OSError):  # such as a file that a reader on NFS has open: later, then
                checkpoints.remove(name)


def prune(checkpoints: Folder, *, keep_last: int, keep_every: int = 0) -> None:
    """Delete old checkpoints.

    Args:
        checkpoints: the folder that holds them.
        keep_last: how many of the newest to keep.
        keep_every: keep those of steps that are multiples of this as well; with 0 none.
    """
    for name in _by_step(checkpoints.names())[:-keep_last]:
        if not keep_every or _step(name) % keep_every:
            # Renamed first, so that one that is half deleted is not taken for damaged.
            with storage(checkpoints.path / name, "deleted"):
                checkpoints.rename(name, f".{name}.deleted")
    tidy(checkpoints)


def clear(checkpoints: Folder) -> None:
    """Delete all checkpoints of a run, those set aside as well."""
    for name in checkpoints.names():
        if any(pattern.fullmatch(name) for pattern in (_NAME, _SET_ASIDE, _LEFT_BEHIND)):
            with storage(checkpoints.path / name, "deleted"):
                checkpoints.remove(name)


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _entries(run_dir: Path) -> list[Path]:
    with storage(run_dir, "read"):
        folder = _folder(run_dir)
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _by_step(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if _NAME.fullmatch(name)), key=_step)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"samestep: {line}", file=sys.stderr, flush=True)
