"""Checkpoints written in the background, while training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from samestep.app.lock import RunLock
from samestep.app.run_folder import checkpoint_path, prune
from samestep.checkpoint.files import write
from samestep.checkpoint.snapshot import Snapshot
from samestep.errors import StorageError
from samestep.workers.agreement import from_first_worker

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes a run's snapshots one at a time, and deletes old checkpoints once a new one is on the disk.

        with CheckpointWriter(lock, keep_last=3) as writer:
            ...
            writer.write(step, lambda: take_snapshot(objects))

    All workers must call its methods; worker 0 takes the snapshots and writes. Leaving waits for what this
    worker writes.

    Args:
        lock: of the run's folder.
        keep_last: how many of the newest checkpoints to keep.
        keep_every: keep those of steps that are multiples of this as well; with 0 none.
    """

    def __init__(self, lock: RunLock, *, keep_last: int, keep_every: int = 0) -> None:
        self._lock = lock
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="samestep-checkpoint")
        self._pending: Future[Path] | None = None
        self._written: list[Path] = []
        self._path: Path | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._finish()  # by itself: the others may end for a reason of their own
        except StorageError as failure:
            if error is None:
                raise
            print(f"samestep: {failure}", file=sys.stderr, flush=True)  # the run ends for another reason
        finally:
            self._pool.shutdown()

    @property
    def has_failed(self) -> bool:
        """Whether this worker already knows that the disk does not take the last snapshot."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def take_written(self) -> list[Path]:
        """Return the checkpoints that are on the disk since this was last asked, on worker 0."""
        if self._pending is not None and self._pending.done() and not self.has_failed:
            self._finish()
        written, self._written = self._written, []
        return written

    def write(self, step: int, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it, once the one before is on the disk.

        Args:
            step: steps taken.
            take: makes the snapshot.

        Raises:
            StorageError: the disk did not take the one before.
        """
        former, self._path = self._path, checkpoint_path(self._lock.run_dir, step)
        self._on_first(
            lambda: self._begin(take), f"step {step}, writing a checkpoint ({former or self._path})"
        )

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one.

        Raises:
            StorageError: the disk did not take it; earlier checkpoints are untouched.
        """
        path, self._path = self._path, None
        self._on_first(self._finish, f"writing the last checkpoint ({path or self._lock.run_dir})")

    def _on_first(self, work: Callable[[], None], what: str) -> None:
        from_first_worker(self._lock.job, work, what)

    def _begin(self, take: Callable[[], Snapshot]) -> None:
        self._finish()  # before the copy, so that there is never more than one
        self._pending = self._pool.submit(self._write, take())

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._written.append(pending.result())

    def _write(self, snapshot: Snapshot) -> Path:
        path = checkpoint_path(self._lock.run_dir, snapshot.step)
        write(snapshot, path, self._lock.checkpoints)
        prune(self._lock.checkpoints, keep_last=self._keep_last, keep_every=self._keep_every)
        return path
