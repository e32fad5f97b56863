"""Checkpoints written in the background while training continues."""

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

    All workers must call `write` and `wait`; worker 0 takes the snapshots and writes them. Leaving the `with`
    block waits for this worker's writes.

    Args:
        lock: the lock of the run folder.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep the checkpoints of steps that are multiples of this; 0 keeps no others.
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
            self._finish()  # without a collective: the other workers may end for another reason
        except StorageError as failure:
            if error is None:
                raise
            print(f"samestep: {failure}", file=sys.stderr, flush=True)  # do not hide the first error
        finally:
            self._pool.shutdown()

    @property
    def has_failed(self) -> bool:
        """Whether writing the last snapshot has already failed on this worker."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def take_written(self) -> list[Path]:
        """Return the checkpoints that were written since the last call; on worker 0, others have none."""
        if self._pending is not None and self._pending.done() and not self.has_failed:
            self._finish()
        written, self._written = self._written, []
        return written

    def write(self, step: int, take: Callable[[], Snapshot]) -> None:
        """Wait until the previous snapshot has been written, take a new one, and start to write it.

        Args:
            step: number of steps taken.
            take: makes the snapshot.

        Raises:
            StorageError: the previous snapshot could not be written.
        """
        former, self._path = self._path, checkpoint_path(self._lock.run_dir, step)
        self._on_first(
            lambda: self._begin(take), f"step {step}, writing a checkpoint ({former or self._path})"
        )

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one.

        Raises:
            StorageError: the snapshot could not be written; earlier checkpoints are untouched.
        """
        path, self._path = self._path, None
        self._on_first(self._finish, f"writing the last checkpoint ({path or self._lock.run_dir})")

    def _on_first(self, work: Callable[[], None], what: str) -> None:
        from_first_worker(self._lock.job, work, what)

    def _begin(self, take: Callable[[], Snapshot]) -> None:
        self._finish()  # before the new snapshot, so that memory never holds two
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
