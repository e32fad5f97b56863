"""One run in a run folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from samestep.checkpoint.durable import make_folder, storage
from samestep.errors import LockedError
from samestep.workers.agreement import from_first_worker
from samestep.workers.job import Job

__all__ = ["WAIT_S", "RunLock"]

WAIT_S = 5.0
"""Seconds that the holder has to end: a launcher may start new workers while old ones still die."""

_POLL_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held: set[int] = set()


class RunLock:
    """Holds a run folder for this job.

    Worker 0 locks the file `lock` in the folder with flock(2), which the kernel releases when the process
    ends, however it ends. On a file system without locks there is a warning, and training goes on.

        with RunLock(run_dir, job):
            ...

    Args:
        run_dir: the folder of the run; made if it is not there.
        job: all its workers must enter.
        wait_s: seconds to wait for another holder to end; `WAIT_S` by default.

    Raises:
        LockedError: on entering, another process holds it.
        StorageError: on entering, the folder cannot be written to.
    """

    def __init__(self, run_dir: Path, job: Job, *, wait_s: float | None = None) -> None:
        self._file = run_dir / "lock"
        self._job = job
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        from_first_worker(self._job, self._acquire)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also where a child process has inherited it
            os.close(self._descriptor)

    def _acquire(self) -> None:
        with storage(self._file):
            make_folder(self._file.parent)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                self._wait_for(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _held.add(descriptor)
        with suppress(OSError):  # the holder's name is for messages only
            os.ftruncate(descriptor, 0)
            holder = f"PID {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
            os.pwrite(descriptor, holder.encode(), 0)

    def _wait_for(self, descriptor: int) -> None:
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise LockedError(self._explain(descriptor)) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                where = self._file.parent
                print(
                    f"samestep: {where}: the file system has no locks; do not start a second run there",
                    file=sys.stderr,
                )
                return
            time.sleep(_POLL_S)

    def _explain(self, descriptor: int) -> str:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace")
        holder = holder if holder.isprintable() and holder else "another process"
        return (
            f"{self._file.parent}: {holder} trains there: wait for it, stop it, or choose another --run-dir"
        )


def _close_in_child() -> None:
    """Close what a forked process inherits: a loader process that outlives its worker must not hold it."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
