"""Replaces a folder as a whole: if the process is killed at any moment, the old one or the new one exists."""

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
    """Yield a new folder to fill; on leaving, rename it to `name`, in place of any folder of that name.

    Args:
        parent: the folder to create it in.
        name: the final name.
        files: the file names that such a folder may hold; one that holds others is not replaced.

    Raises:
        StorageError: `name` belongs to something else, or another process is replacing it.
        OSError: the disk failed. On any error, what had the name before still has it.
    """
    unfinished = f".{name}.unfinished"
    folder = _claim(parent, unfinished, files)
    try:
        _recover(parent, name, files)
        _check_replaceable(parent, name, files)
        yield folder
        _install(parent, unfinished, name)
    finally:
        with suppress(OSError):  # the next call deletes it
            parent.remove(unfinished)  # free its space, as the disk may be full
        _release(folder)


def replaced_name(name: str) -> str:
    """Return the temporary name of the old folder, on systems that cannot swap two names."""
    return f".{name}.replaced"


def _claim(parent: Folder, name: str, files: Collection[str]) -> Folder:
    """Create and lock a new folder, after deleting what a killed process left there."""
    while True:
        _sweep(parent, name, files)
        try:
            parent.make(name)
        except FileExistsError:  # another process was quicker
            continue
        folder = parent.folder(name)
        if hold(folder.descriptor) is not False and folder.is_there():
            return folder
        _release(folder)


def _sweep(parent: Folder, name: str, files: Collection[str]) -> None:
    """Delete what a killed process left; raise if a live one is writing there."""
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
    """Check that no foreign file would be lost: the name is free, a link, or a folder of known files."""
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
    """Return whether the operating system may have put a file there, such as .DS_Store or .nfs0123."""
    return name.startswith(".") or name in _OF_SYSTEMS


def _install(parent: Folder, unfinished: str, name: str) -> None:
    """Rename the new folder to `name`; the old one is deleted, or left under the name `unfinished`."""
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
    """Restore a folder that a killed process had renamed to replace it."""
    replaced = replaced_name(name)
    _check_replaceable(parent, replaced, files)
    if parent.look(name) is None and parent.look(replaced) is not None:
        parent.rename(replaced, name)
    parent.remove(replaced)
