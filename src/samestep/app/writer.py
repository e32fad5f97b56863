"""Checkpoints written in the background, while training goes on."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from samestep.app.run_folder import checkpoint_path, prune
from samestep.checkpoint.files import write
from samestep.checkpoint.snapshot import Snapshot
from samestep.errors import StorageError

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes a run's snapshots one at a time, and deletes old checkpoints once a new one is on the disk.

        with CheckpointWriter(run_dir, keep_last=3) as writer:
            ...
            writer.wait()
            writer.write(take_snapshot(objects))

    Leaving waits for the last one.

    Args:
        run_dir: the folder of the run; its lock is held.
        keep_last: how many of the newest checkpoints to keep.
        keep_every: keep those of steps that are multiples of this as well; with 0 none.
    """

    def __init__(self, run_dir: Path, *, keep_last: int, keep_every: int = 0) -> None:
        self._run_dir = run_dir
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="samestep-checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.wait()
        except StorageError as failure:
            if error is None:
                raise
            print(f"samestep: {failure}", file=sys.stderr, flush=True)  # the run ends for another reason
        finally:
            self._pool.shutdown()

    def write(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot, once the one before is on the disk.

        Raises:
            StorageError: the disk did not take the one before.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, snapshot)

    def wait(self) -> None:
        """Wait for the snapshot that is being written, if there is one. Do so before taking the next.

        Raises:
            StorageError: the disk did not take it; earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what went wrong in the meantime, if anything did.

        Raises:
            StorageError: the disk did not take the last snapshot.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def _write(self, snapshot: Snapshot) -> None:
        write(snapshot, checkpoint_path(self._run_dir, snapshot.step))
        prune(self._run_dir, keep_last=self._keep_last, keep_every=self._keep_every)
