"""One run in a run folder at a time, and in that very folder, whatever its path leads to later."""

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
"""Seconds that the holder has to end: a launcher may start new workers while old ones still die."""

_CLAIM_S = 0.5
"""Seconds that the holder has to end where this job has gone on without it."""

_HOLDER = re.compile(r"(PID \d+ on .*?(, job (?P<job>\w+), generation (?P<generation>\d+))?)?")


class RunLock:
    """Holds a run folder for this job.

    Worker 0 locks the file `lock` in the folder with flock(2), which the kernel releases when the process
    ends, however it ends, and keeps the folder and its `checkpoints` open. On a file system without locks
    there is a warning, and training goes on.

        with RunLock(run_dir, job) as lock:
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
        self.run_dir = run_dir
        self.job = job
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._open = ExitStack()
        self._folders: tuple[Folder, Folder] | None = None
        self._lock: FileLock | None = None
        self._term: tuple[str, int] | None = None  # with which it was taken

    def __enter__(self) -> RunLock:
        if not self.job.is_newcomer:  # to a job that holds it
            from_first_worker(self.job, self._acquire, f"locking the run folder ({self.run_dir})")
        return self

    def take_over(self) -> None:
        """Hold the folder after a worker that has held it for this job, and was left behind.

        It may still run, cut off or stopped, and have the lock: then this worker's generation counts, which
        it writes into the file.
        """
        if self._lock is None:
            self._acquire()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def folder(self) -> Folder:
        """The run's folder, on worker 0, after the same look as for `checkpoints`."""
        self.check()
        assert self._folders is not None
        return self._folders[0]

    @property
    def checkpoints(self) -> Folder:
        """The folder of the run's checkpoints, on worker 0, after a look whether it is still where it was.

        Raises:
            StorageError: it is not.
        """
        self.check()
        assert self._folders is not None
        return self._folders[1]

    def check(self) -> None:
        """Check, before something is written, that the run's path leads to the folder that is locked.

        Raises:
            StorageError: it was moved, deleted or replaced; or a later generation of the job has taken over.
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
            error.exit_status = 2  # the command names a folder that is of no use
            raise

    def _sign(self, lock: FileLock) -> None:
        """Write down who holds it, for messages only, unless a file of somebody else's has the name."""
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
        """Say whether the holder belongs to an earlier generation of this job."""
        found, renewable = _term_in(text), self.job.renewable
        return found is not None and renewable is not None and _is_later(renewable.term(), found)

    def _check_term(self, text: str, *, is_held: bool) -> None:
        """Raise where a later generation has taken over; or another job has since this one holds it."""
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
    """Return the job and the generation that a holder has written down."""
    found = _HOLDER.fullmatch(text)
    return (found["job"], int(found["generation"])) if found and found["job"] else None


def _is_later(one: tuple[str, int], other: tuple[str, int]) -> bool:
    return one[0] == other[0] and one[1] > other[1]
