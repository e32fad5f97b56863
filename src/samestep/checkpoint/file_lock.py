"""Locks of flock(2), which the kernel releases when their holder ends, however it ends."""

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
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)  # the last for a folder on NFS

_held: set[int] = set()


def hold(descriptor: int) -> bool | None:
    """Lock what is open until `let_go`: False if another has it, None if the file system has no locks."""
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
    """Take what is open for one that `hold` has locked, though another process has the lock."""
    _held.add(descriptor)


def let_go(descriptor: int) -> bool:
    """Unlock what `hold` has locked, before it is closed; False where nothing was: in a child process."""
    if descriptor not in _held:
        return False
    _held.discard(descriptor)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a child process has inherited it
    return True


class FileLock:
    """A file in an open folder that one process at a time holds.

    Attributes:
        is_real: False where the file system has no locks; after `acquire`.
        is_claimed: whether another process still has the lock that this one claims.
        text: what the holder has written into it, where `acquire` has failed.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.is_real = True
        self.is_claimed = False
        self.text = ""
        self._folder = folder
        self._name = name
        self._descriptor = -1

    def acquire(self, wait_s: float, *, claims: Callable[[str], bool] = lambda text: False) -> bool:
        """Make the file if it is not there, and lock it; wait so many seconds, and say whether it is held.

        Args:
            wait_s: how long to wait for another holder.
            claims: whether to take it from a holder that has written this text.

        Raises:
            StorageError: something else has its name: a pipe, a device, a file with another name as well.
            OSError: it cannot be opened; a link is not followed.
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
            self.release()  # it was deleted before it was locked

    def try_again(self) -> None:
        """Lock what was claimed, if its holder is gone by now."""
        if self.is_claimed and hold(self._descriptor):
            self.is_claimed = False

    def release(self) -> None:
        """Let another process have it."""
        if let_go(self._descriptor):
            os.close(self._descriptor)

    def is_there(self) -> bool:
        """Say whether the name still leads to the file that is held."""
        found = self._folder.look(self._name)
        return found is not None and os.path.samestat(found, os.fstat(self._descriptor))

    def read(self) -> str:
        """Return its text, as another process may have written it: NFS shows that where a file is opened."""
        descriptor = self._open()
        text = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        return text

    def write(self, text: str) -> None:
        """Replace its text."""
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
    """Close what a forked process inherits: a loader process that outlives its worker must not hold it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
