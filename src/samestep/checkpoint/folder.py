"""Folders held open, for all that samestep writes: no rename of a folder above can turn it into another's.

What is created is new (`O_EXCL`): links, pipes and files that were put in its place are never written to.
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
    """An open folder: what is done in it is done in this very one, wherever its path leads by now.

        with Folder.open(path) as folder:
            ...

    Args:
        path: where it was opened.
        descriptor: of it; closed on leaving.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._absolute = os.path.abspath(path)  # the process may go to another working folder

    @classmethod
    def open(cls, path: Path, *, make: bool = False) -> Folder:
        """Open a folder; with `make` make it where it is not there."""
        if make:
            make_folder(path)
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def is_there(self) -> bool:
        """Say whether its path still leads to it."""
        try:
            found = os.stat(self._absolute)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self.descriptor))

    def names(self) -> list[str]:
        """Return what is in it, sorted."""
        return sorted(os.listdir(self.descriptor))

    def look(self, name: str) -> os.stat_result | None:
        """Describe an entry, a link as such; None where there is none."""
        with self.naming(name):
            try:
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def path_of(self, name: str) -> Path:
        """Return a path that leads to an entry, for libraries that take nothing else."""
        by_descriptor = Path(f"/proc/self/fd/{self.descriptor}")
        return (by_descriptor if by_descriptor.exists() else self.path) / name

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """Open a folder in it, which may be a link to one; with `make` make a new one where nothing is."""
        with self.naming(name):
            if make and self.look(name) is None:
                self.make(name)
                self.flush()
            return Folder(
                self.path / name, os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.descriptor)
            )

    def make(self, name: str) -> None:
        """Make a folder in it."""
        with self.naming(name):
            os.mkdir(name, dir_fd=self.descriptor)

    def create(self, name: str) -> BinaryIO:
        """Make a file, and open it for writing; it is an error if anything has that name."""
        with self.naming(name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            return os.fdopen(os.open(name, flags, 0o666, dir_fd=self.descriptor), "wb")

    def unlink(self, name: str) -> None:
        """Delete a file or a link, if it is there."""
        with self.naming(name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Delete a folder with all that is in it, or a file, or a link, if it is there."""
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
        """Give two entries each other's names, in one indivisible act; False where the system has none."""
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
        """Wait until the names in it are on the disk."""
        os.fsync(self.descriptor)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Let an error name the whole path."""
        try:
            yield
        except OSError as error:
            if not isinstance(error, Error):
                error.filename = os.fspath(self.path / name)
            raise


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are not there; names that are new are on the disk then."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)
