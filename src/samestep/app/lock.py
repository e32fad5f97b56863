"""The lock of a run folder: one job at a time trains there, and only in the folder that it has locked."""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from samestep.checkpoint.durable import storage
from samestep.checkpoint.file_lock import FileLock
from samestep.checkpoint.folder import Folder
from samestep.errors import LockedError, StorageError, one_line
from samestep.workers.agreement import from_first_worker
from samestep.workers.job import Job

__all__ = ["WAIT_S", "RunLock"]

WAIT_S = 5.0
"""Seconds to wait for the holder to end: a launcher may start new workers while old ones are still ending."""

_CLAIM_S = 0.5
"""Seconds to wait for a holder that this job has replaced."""

_HOLDER = re.compile(r"(PID \d+ on .*?(, job (?P<job>\w+), generation (?P<generation>\d+))?)?")


class RunLock:
    """Locks a run folder for this job.

    Worker 0 locks the file `lock` in the folder with flock(2), which the kernel releases however the process
    ends, and keeps the folder and its `checkpoints` open. On a file system without locks it prints a warning,
    and training continues.

        with RunLock(run_dir, job) as lock:
            ...

    Args:
        run_dir: the run folder; created if it does not exist.
        job: the job; all its workers must enter the `with` block.
        wait_s: seconds to wait for another holder to end; `WAIT_S` by default.

    Raises:
        LockedError: on entering, another process holds the lock.
        StorageError: on entering, the folder cannot be written to.
    """

    def __init__(self, run_dir: Path, job: Job, *, wait_s: float | None = None) -> None:
        self.run_dir = run_dir
        self.job = job
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._open = ExitStack()
        self._folders: tuple[Folder, Folder] | None = None
        self._lock: FileLock | None = None
        self._term: tuple[str, int] | None = None  # job and generation in which the lock was taken

    def __enter__(self) -> RunLock:
        if not self.job.is_newcomer:  # a newcomer's job already holds the lock
            from_first_worker(self.job, self._acquire, f"locking the run folder ({self.run_dir})")
        return self

    def take_over(self) -> None:
        """Take the lock over from a lost worker of this job.

        The lost worker may still run, cut off or stopped, and hold the lock. So this worker writes its
        generation into the file, and the latest generation counts.
        """
        if self._lock is None:
            self._acquire()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def folder(self) -> Folder:
        """The run folder, on worker 0, after the same check as for `checkpoints`."""
        self.check()
        assert self._folders is not None
        return self._folders[0]

    @property
    def checkpoints(self) -> Folder:
        """The folder of the run's checkpoints, on worker 0, after `check`.

        Raises:
            StorageError: see `check`.
        """
        self.check()
        assert self._folders is not None
        return self._folders[1]

    def check(self) -> None:
        """Check, before something is written, that the run's path still leads to the locked folder.

        Raises:
            StorageError: the folder was moved, deleted or replaced; or a later generation of this job, or
                another job, has taken over.
        """
        if self._folders is None or self._lock is None:
            return  # not worker 0
        with storage(self.run_dir):
            places = [folder.path for folder in self._folders if not folder.is_there()]
            if not places and not self._lock.is_there():
                places.append(self.run_dir / "lock")
        if places:
            raise StorageError(
                f"{places[0]}: was moved, deleted or replaced during the run: nothing more is written there; "
                "put it back, or choose another --run-dir"
            )
        with storage(self.run_dir):
            self._lock.try_again()
            self._check_term(self._lock.read(), is_held=True)

    def _acquire(self) -> None:
        try:
            with storage(self.run_dir), ExitStack() as stack:
                folder = stack.enter_context(Folder.open(self.run_dir, make=True))
                lock = FileLock(folder, "lock")
                is_held = lock.acquire(min(self._wait_s, _CLAIM_S))
                if not (is_held or lock.acquire(self._wait_s, claims=self._is_earlier)):
                    raise LockedError(self._explain(lock.text))
                stack.callback(lock.release)
                self._term = None if self.job.renewable is None else self.job.renewable.term()
                self._check_term(lock.read(), is_held=False)
                self._sign(lock)
                checkpoints = stack.enter_context(folder.folder("checkpoints", make=True))
                self._folders, self._lock, self._open = (folder, checkpoints), lock, stack.pop_all()
        except StorageError as error:
            error.exit_status = 2  # the command line names a folder that cannot be used
            raise

    def _sign(self, lock: FileLock) -> None:
        """Write the holder into the file, unless it holds other text and so is not a lock file of samestep.

        Messages show the holder; its generation also decides whether a later worker may take over.
        """
        if not lock.is_real:
            print(
                f"samestep: {self.run_dir}: the file system has no locks; do not start a second run there",
                file=sys.stderr,
            )
        if _HOLDER.fullmatch(lock.read()):
            holder = f"PID {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
            if self._term is not None:
                holder += ", job {}, generation {}".format(*self._term)
            with suppress(OSError):
                lock.write(holder)

    def _is_earlier(self, text: str) -> bool:
        """Return whether the holder belongs to an earlier generation of this job."""
        found, renewable = _term_in(text), self.job.renewable
        return found is not None and renewable is not None and _is_later(renewable.term(), found)

    def _check_term(self, text: str, *, is_held: bool) -> None:
        """Raise if a later generation of this job, or while the lock is held another job, has taken over."""
        found, own = _term_in(text), self._term
        if found is None or own is None:
            return
        if _is_later(found, own) or (is_held and found[0] != own[0]):
            raise StorageError(
                f"{self.run_dir}: {one_line(text)} trains there: this worker, of job {own[0]}, generation "
                f"{own[1]}, was left behind and writes nothing more"
            )

    def _explain(self, text: str) -> str:
        holder = text if text.isprintable() and text else "another process"
        return f"{self.run_dir}: {holder} trains there: wait for it, stop it, or choose another --run-dir"


def _term_in(text: str) -> tuple[str, int] | None:
    """Return the job and generation of the holder that the text names; None if it names none."""
    found = _HOLDER.fullmatch(text)
    return (found["job"], int(found["generation"])) if found and found["job"] else None


def _is_later(one: tuple[str, int], other: tuple[str, int]) -> bool:
    return one[0] == other[0] and one[1] > other[1]
