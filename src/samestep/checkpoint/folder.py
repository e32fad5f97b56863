"""Folders held open for everything that samestep writes, so that renaming a parent cannot redirect a write.

Files are created with `O_EXCL`, so links, pipes and files that someone put in their place are never written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from samestep.errors import Error

__all__ = ["Folder", "flush", "make_folder"]

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


class Folder:
    """An open folder: operations act on this folder, even if its path now leads to another.

        with Folder.open(path) as folder:
            ...

    Args:
        path: the path it was opened by.
        descriptor: its file descriptor, which `close` closes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._absolute = os.path.abspath(path)  # the working directory may change

    @classmethod
    def open(cls, path: Path, *, make: bool = False) -> Folder:
        """Open a folder; with `make`, create it if it is missing."""
        if make:
            make_folder(path)
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def is_there(self) -> bool:
        """Return whether the path still leads to this folder."""
        try:
            found = os.stat(self._absolute)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self.descriptor))

    def names(self) -> list[str]:
        """Return the names of the entries, sorted."""
        return sorted(os.listdir(self.descriptor))

    def look(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, not following a link; None if there is no entry."""
        with self.naming(name):
            try:
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def path_of(self, name: str) -> Path:
        """Return a path to an entry, for libraries that need one."""
        by_descriptor = Path(f"/proc/self/fd/{self.descriptor}")
        return (by_descriptor if by_descriptor.exists() else self.path) / name

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """Open a subfolder, or a link to one; with `make`, create it if there is no such entry."""
        with self.naming(name):
            if make and self.look(name) is None:
                self.make(name)
                self.flush()
            return Folder(
                self.path / name, os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.descriptor)
            )

    def make(self, name: str) -> None:
        """Create a subfolder."""
        with self.naming(name):
            os.mkdir(name, dir_fd=self.descriptor)

    def create(self, name: str) -> BinaryIO:
        """Create a file and open it for writing; an existing entry is an error."""
        with self.naming(name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            return os.fdopen(os.open(name, flags, 0o666, dir_fd=self.descriptor), "wb")

    def unlink(self, name: str) -> None:
        """Delete a file or link, if it exists."""
        with self.naming(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Delete a folder with its content, a file or a link, if it exists."""
        found = self.look(name)
        with self.naming(name):
            if found is not None and stat.S_ISDIR(found.st_mode):
                shutil.rmtree(name, dir_fd=self.descriptor)
            else:
                self.unlink(name)

    def rename(self, name: str, to: str) -> None:
        """Rename an entry; a file or an empty folder of the new name is replaced."""
        with self.naming(to):
            os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def exchange(self, name: str, other: str) -> bool:
        """Swap the names of two entries atomically; return False if the system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            return False
        names = os.fsencode(name), os.fsencode(other)
        if libc.renameat2(self.descriptor, names[0], self.descriptor, names[1], _EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NO_EXCHANGE:
            return False
        raise OSError(number, os.strerror(number), os.fspath(self.path / other))

    def flush(self) -> None:
        """Wait until the names of the entries are on disk."""
        os.fsync(self.descriptor)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Put an entry's full path into an `OSError`."""
        try:
            yield
        except OSError as error:
            if not isinstance(error, Error):
                error.filename = os.fspath(self.path / name)
            raise


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush the new names to disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)
