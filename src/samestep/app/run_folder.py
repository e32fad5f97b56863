"""The checkpoints of a run: which there are, the newest whole one, and what becomes of the others.

    RUN_DIR/checkpoints/step-00001000               a checkpoint
    RUN_DIR/checkpoints/.step-00001000.unfinished   one that is being written
    RUN_DIR/checkpoints/step-00001000.damaged       one that was set aside

Only the process that holds the run's lock renames or deletes; reading needs no lock.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch.utils import _pytree as pytree

from samestep.checkpoint.durable import remove, storage
from samestep.checkpoint.files import Found, read
from samestep.checkpoint.manifest import MANIFEST
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

_NAME = re.compile(r"step-(\d{8,})")
_SET_ASIDE = re.compile(r"step-\d{8,}\.damaged(-\d+)?")
_LEFT_BEHIND = re.compile(r"\.(step-\d{8,})\.(unfinished|deleted)")


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
    return sorted((path for path in _entries(run_dir) if _NAME.fullmatch(path.name)), key=_step)


def search(run_dir: Path, *, newer_than: int = -1, refused: Container[Path] = ()) -> Search:
    """Look for the newest whole checkpoint of a run; nothing is changed.

    Args:
        run_dir: the folder of the run.
        newer_than: leave out those of this step and before.
        refused: leave these out.

    Raises:
        DataError: the newest is of a newer format.
        StorageError: it cannot be read.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(all_checkpoints(run_dir)):
        if _step(path) <= newer_than or path in refused:
            continue
        try:
            found = read(path)
            if found.manifest.step != _step(path):
                raise DamagedError(f"{path}: holds step {found.manifest.step}")
            return Search(found, tuple(damaged))
        except (DamagedError, MissingFileError) as error:
            if not os.path.lexists(path):  # the run has deleted it just now, so it has newer ones
                return search(run_dir, newer_than=newer_than, refused=refused)
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
    if os.path.lexists(path / MANIFEST):
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


def set_aside(result: Search) -> None:
    """Name the damaged checkpoints that were passed over, and rename them."""
    for path, reason in result.damaged:
        _print([f"{reason}; set aside as {_rename(path, f'{path.name}.damaged')}"])


def tidy(run_dir: Path) -> None:
    """Set aside, or finish deleting, what a killed run was in the middle of."""
    for path in _entries(run_dir):
        match = _LEFT_BEHIND.fullmatch(path.name)
        if match and match[2] == "deleted":
            _delete(path)
        elif match:
            _print([f"{path}: was not finished; set aside as {_rename(path, f'{match[1]}.unfinished')}"])


def prune(run_dir: Path, *, keep_last: int, keep_every: int = 0) -> None:
    """Delete old checkpoints.

    Args:
        run_dir: the folder of the run.
        keep_last: how many of the newest to keep.
        keep_every: keep those of steps that are multiples of this as well; with 0 none.
    """
    for path in all_checkpoints(run_dir)[:-keep_last]:
        if not keep_every or _step(path) % keep_every:
            # Renamed first, so that one that is half deleted is not taken for damaged.
            hidden = path.with_name(f".{path.name}.deleted")
            with storage(path, "deleted"):
                path.rename(hidden)
            _delete(hidden)


def clear(run_dir: Path) -> None:
    """Delete all checkpoints of a run, those set aside as well."""
    for path in _entries(run_dir):
        if path.name.lstrip(".").startswith("step-"):
            _delete(path)


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _entries(run_dir: Path) -> list[Path]:
    with storage(run_dir, "read"):
        folder = _folder(run_dir)
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _delete(path: Path) -> None:
    with storage(path, "deleted"):
        remove(path)


def _rename(path: Path, name: str) -> str:
    """Rename an entry, to a name that is free, and return that."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    free = next(name for name in names if not os.path.lexists(path.with_name(name)))
    with storage(path, "renamed"):
        path.rename(path.with_name(free))
    return free


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"samestep: {line}", file=sys.stderr, flush=True)
