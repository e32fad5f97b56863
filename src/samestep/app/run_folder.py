"""The checkpoints in a run folder: finding the newest whole one, renaming damaged ones, deleting old ones.

    RUN_DIR/checkpoints/step-00001000               a checkpoint
    RUN_DIR/checkpoints/.step-00001000.unfinished   being written, or left behind by a killed run
    RUN_DIR/checkpoints/.step-00001000.deleted      being deleted
    RUN_DIR/checkpoints/step-00001000.damaged       set aside because it is damaged

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

from samestep.app.loggers.json_lines import FILE as METRICS, last_checkpoint
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

_OR_ELSE = "choose another --run-dir, or start over with --fresh, or fresh=True in a script"
_NAME = re.compile(r"step-[0-9]{8,}")
_SET_ASIDE = re.compile(r"step-[0-9]{8,}\.damaged(-[0-9]+)?")
_LEFT_BEHIND = re.compile(r"\.step-[0-9]{8,}\.(unfinished|deleted)")


@dataclass(frozen=True)
class Search:
    """The result of `search`.

    Attributes:
        found: the newest whole checkpoint; None if there is none.
        damaged: the damaged checkpoints newer than that, newest first, and what is wrong with each.
    """

    found: Found | None
    damaged: tuple[tuple[Path, str], ...]


pytree.register_dataclass(Search)  # for `from_first_worker`, which sends the tensors in a pytree


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
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
    """Find the newest whole checkpoint of a run, without changing anything.

    Args:
        run_dir: the run folder.
        newer_than: skip checkpoints of this step and earlier ones.
        refused: skip these checkpoints.
        held: the run folder, held open to notice if the path leads to another folder.

    Raises:
        DataError: the newest checkpoint has a newer format.
        MissingFileError: the path no longer leads to `held`.
        StorageError: a file cannot be read.
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
            if not os.path.lexists(path):  # just deleted by the run, so there are newer checkpoints
                return search(run_dir, newer_than=newer_than, refused=refused, held=held)
            damaged.append((path, str(error)))
    return Search(None, tuple(damaged))


def newest_whole(run_dir: Path) -> Search:
    """Find the newest whole checkpoint of a run; `found` is None if the run never had a checkpoint.

    Raises:
        DataError: there are checkpoints, set aside or not, but none is whole; or the run had checkpoints, but
            they are gone.
    """
    result = search(run_dir)
    if result.found is not None:
        return result
    aside = [path for path in _entries(run_dir) if _SET_ASIDE.fullmatch(path.name)]
    if result.damaged or aside:
        print_damaged(result)
        raise DataError(
            f"{run_dir}: none of its {len(result.damaged) + len(aside)} checkpoints is whole: restore one, "
            f"{_OR_ELSE}"
        )
    last = last_checkpoint(run_dir)
    if last is not None:
        raise DataError(
            f"{run_dir}: its checkpoints are gone: {METRICS} names {last} as the last one, and checkpoints/ "
            f"has none: restore them, mount their disk, {_OR_ELSE}"
        )
    return result


def read_digest(path: Path) -> str:
    """Return the digest of the weights in a checkpoint, or in the newest whole checkpoint of a run."""
    replaced = path.parent / replaced_name(path.name)
    if os.path.lexists(path / MANIFEST) or (os.path.lexists(replaced) and not os.path.lexists(path)):
        return read(path).manifest.digest
    return find_newest(path).manifest.digest


def find_newest(run_dir: Path) -> Found:
    """Return the newest whole checkpoint of a run, and print the damaged ones; nothing is changed.

    Raises:
        DataError: there are checkpoints, but none is whole.
        MissingFileError: there is no checkpoint, or no folder.
    """
    result = newest_whole(run_dir)
    if result.found is None and not os.path.isdir(run_dir):
        what = "not a folder" if os.path.lexists(run_dir) else "not found"
        raise MissingFileError(f"{run_dir}: {what}; expected a checkpoint, or a run folder")
    if result.found is None:
        raise MissingFileError(f"{run_dir}: has no checkpoint; train first, or name another run folder")
    print_damaged(result)
    return result.found


def print_damaged(result: Search) -> None:
    """Print the damaged checkpoints that were skipped."""
    _print(f"{reason}; not used" for _, reason in result.damaged)


def set_aside(result: Search, checkpoints: Folder) -> None:
    """Rename the damaged checkpoints that were skipped, and print them."""
    for path, reason in result.damaged:
        with storage(path, "renamed"):
            names = (f"{path.name}.damaged{f'-{n}' * (n > 1)}" for n in count(1))
            free = next(name for name in names if checkpoints.look(name) is None)
            checkpoints.rename(path.name, free)
        _print([f"{reason}; set aside as {free}"])


def tidy(checkpoints: Folder) -> None:
    """Delete checkpoints that a killed run left half written or half deleted."""
    for name in checkpoints.names():
        if _LEFT_BEHIND.fullmatch(name):
            with suppress(OSError):  # such as while a reader on NFS has a file open; the next call retries
                checkpoints.remove(name)


def prune(checkpoints: Folder, *, keep_last: int, keep_every: int = 0) -> None:
    """Delete old checkpoints.

    Args:
        checkpoints: the folder of the checkpoints.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep the checkpoints of steps that are multiples of this; 0 keeps no others.
    """
    for name in _by_step(checkpoints.names())[:-keep_last]:
        if not keep_every or _step(name) % keep_every:
            # Rename first, so that a half-deleted checkpoint is not taken for a damaged one.
            with storage(checkpoints.path / name, "deleted"):
                checkpoints.rename(name, f".{name}.deleted")
    tidy(checkpoints)


def clear(checkpoints: Folder) -> None:
    """Delete all checkpoints of a run, including those set aside."""
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
