"""A worker process, as its launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WorkerProcess"]

_MAX_STATUS = 128
"""The highest exit status of a failure; 128 + n means that signal n stopped the worker."""


@dataclass
class WorkerProcess:
    """A worker process.

    Attributes:
        number: unique among all workers that the job has had; those of host h start at h · `PER_HOST`.
        local_rank: a replacement has that of the worker that it replaces.
        process: the process, in its own session, so that a terminal's signals reach only the launcher.
        error_file: the file in which the worker records why it failed.
        last_signal: the last signal that `end` sent; None if it sent none.
        is_left_behind: whether the others have continued without the worker.
    """

    number: int
    local_rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    last_signal: signal.Signals | None = None
    is_left_behind: bool = False

    @property
    def status(self) -> int | None:
        """The exit status, −n if signal n killed the worker; None if it was running at the last `look`."""
        return self.process.returncode

    @property
    def has_failed(self) -> bool:
        """Whether the worker has ended with an error, and not because of a signal."""
        return 0 < (self.status or 0) <= _MAX_STATUS

    def look(self) -> None:
        """Update `status`."""
        self.process.poll()

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its child processes, and continue them if they are stopped."""
        if self.process.poll() is None:
            self.last_signal = number
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker has just ended
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)
