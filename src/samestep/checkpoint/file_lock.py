"""Locks by flock(2), which the kernel releases when their holder ends, for whatever reason."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress

from samestep.checkpoint.folder import Folder
from samestep.errors import StorageError

__all__ = ["FileLock", "hold", "keep", "let_go"]

_POLL_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)  # EBADF: a folder on NFS

_held: set[int] = set()


def hold(descriptor: int) -> bool | None:
    """Lock an open file until `let_go`: False if another process has the lock, None without lock support."""
    found: bool | None = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        found = None
    _held.add(descriptor)
    return found


def keep(descriptor: int) -> None:
    """Treat an open file as locked by `hold`, although another process holds the lock."""
    _held.add(descriptor)


def let_go(descriptor: int) -> bool:
    """Unlock a file that `hold` locked, before closing it; False for any other, as in a forked child."""
    if descriptor not in _held:
        return False
    _held.discard(descriptor)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a child inherited the file
    return True


class FileLock:
    """A file in an open folder that one process at a time holds.

    Attributes:
        is_real: after `acquire`, whether the file system supports locks.
        is_claimed: whether this process claims the lock while another still holds it.
        text: after `acquire` has failed, the text that the holder wrote to the file.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.is_real = True
        self.is_claimed = False
        self.text = ""
        self._folder = folder
        self._name = name
        self._descriptor = -1

    def acquire(self, wait_s: float, *, claims: Callable[[str], bool] = lambda text: False) -> bool:
        """Create the file if it is missing, lock it, and return whether this process now has the lock.

        Args:
            wait_s: how long to wait for another holder, in seconds.
            claims: from the text of the current holder to whether to claim the lock from it.

        Raises:
            StorageError: the name belongs to a pipe, a device or a file with several hard links.
            OSError: the file cannot be opened; symbolic links are not followed.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            descriptor = self._open()
            held = hold(descriptor)
            if held is False:
                self.text = os.pread(descriptor, 200, 0).decode(errors="replace")
                if claims(self.text):
                    keep(descriptor)
                    self._descriptor, self.is_claimed = descriptor, True
                    return True
                os.close(descriptor)
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_POLL_S)
                continue
            self._descriptor, self.is_real = descriptor, held is True
            if self.is_there():
                return True
            self.release()  # deleted before it was locked

    def try_again(self) -> None:
        """Lock the claimed file, if its former holder has ended."""
        if self.is_claimed and hold(self._descriptor):
            self.is_claimed = False

    def release(self) -> None:
        """Unlock and close the file."""
        if let_go(self._descriptor):
            os.close(self._descriptor)

    def is_there(self) -> bool:
        """Return whether the name still refers to the locked file."""
        found = self._folder.look(self._name)
        return found is not None and os.path.samestat(found, os.fstat(self._descriptor))

    def read(self) -> str:
        """Return the current text. The file is opened again, because NFS shows others' writes only then."""
        descriptor = self._open()
        text = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        return text

    def write(self, text: str) -> None:
        """Replace the text."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        with self._folder.naming(self._name):
            descriptor = os.open(self._name, flags, 0o644, dir_fd=self._folder.descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        path = self._folder.path / self._name
        raise StorageError(f"{path}: is a pipe, a device or a hard link: remove it")


def _close_in_child() -> None:
    """Close inherited files in a fork: a loader process that outlives its worker must not keep the lock."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
