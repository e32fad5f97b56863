"""A folder that takes another's place whole: killed at any moment, the old one or the new one is there."""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from samestep.checkpoint.file_lock import hold, let_go
from samestep.checkpoint.folder import Folder
from samestep.errors import StorageError, one_line

__all__ = ["replaced_name", "replacing"]

_OF_SYSTEMS = ("Thumbs.db", "desktop.ini", "lost+found")


@contextmanager
def replacing(parent: Folder, name: str, files: Collection[str]) -> Iterator[Folder]:
    """Make a new folder, to be filled, which then takes the place of what has the name, if anything has.

    Args:
        parent: where.
        name: of the folder.
        files: the names that files in it may have: a folder that holds others is not replaced.

    Raises:
        StorageError: what is there is something else, or another process is at it.
        OSError: of the disk; on any error, what was there before still is.
    """
    unfinished = f".{name}.unfinished"
    folder = _claim(parent, unfinished, files)
    try:
        _recover(parent, name, files)
        _check_replaceable(parent, name, files)
        yield folder
        _install(parent, unfinished, name)
    finally:
        with suppress(OSError):  # the next one deletes it
            parent.remove(unfinished)  # it would keep a full disk full
        _release(folder)


def replaced_name(name: str) -> str:
    """Return the name that a folder has for a moment where a system cannot exchange it for the new one."""
    return f".{name}.replaced"


def _claim(parent: Folder, name: str, files: Collection[str]) -> Folder:
    """Make and lock a new folder, in place of what a killed process has left there."""
    while True:
        _sweep(parent, name, files)
        try:
            parent.make(name)
        except FileExistsError:  # another process has been quicker
            continue
        folder = parent.folder(name)
        if hold(folder.descriptor) is not False and folder.is_there():
            return folder
        _release(folder)


def _sweep(parent: Folder, name: str, files: Collection[str]) -> None:
    """Delete what a killed process has left, but not what a live one writes."""
    _check_replaceable(parent, name, files)
    found = parent.look(name)
    if found is None or not stat.S_ISDIR(found.st_mode):
        parent.unlink(name)
        return
    folder = parent.folder(name)
    try:
        if hold(folder.descriptor) is False:
            raise StorageError(f"{folder.path}: another process writes there: wait, or choose another path")
        parent.remove(name)
    finally:
        _release(folder)


def _release(folder: Folder) -> None:
    let_go(folder.descriptor)
    folder.close()


def _check_replaceable(parent: Folder, name: str, files: Collection[str]) -> None:
    """Check that nobody's files are lost: there is nothing, or a link, or a folder of such files only."""
    found = parent.look(name)
    if found is None or stat.S_ISLNK(found.st_mode):
        return
    path = parent.path / name
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path}: is not a folder, so it is not replaced: choose another path")
    with parent.folder(name) as folder:
        others = [other for other in folder.names() if other not in files and not _is_of_system(other)]
    if others:
        raise StorageError(
            f"{path / one_line(others[0])}: does not belong to a checkpoint, so its folder is not replaced: "
            "choose another path"
        )


def _is_of_system(name: str) -> bool:
    """Say whether a file is one that systems put into any folder, such as .DS_Store or .nfs0123."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _install(parent: Folder, unfinished: str, name: str) -> None:
    """Give the new folder its name; what had it before is deleted, or has the temporary name then."""
    if parent.look(name) is None:
        parent.rename(unfinished, name)
    elif not parent.exchange(unfinished, name):
        replaced = replaced_name(name)
        parent.rename(name, replaced)
        try:
            parent.rename(unfinished, name)
        except OSError:
            parent.rename(replaced, name)
            raise
        parent.flush()
        parent.remove(replaced)
    parent.flush()


def _recover(parent: Folder, name: str, files: Collection[str]) -> None:
    """Put a folder back that was about to be replaced by a process that was killed."""
    replaced = replaced_name(name)
    _check_replaceable(parent, replaced, files)
    if parent.look(name) is None and parent.look(replaced) is not None:
        parent.rename(replaced, name)
    parent.remove(replaced)
