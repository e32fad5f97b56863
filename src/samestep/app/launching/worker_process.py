"""One worker's process, as its launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WorkerProcess"]

_MAX_STATUS = 128
"""Those above are of workers that a signal has stopped, after their last checkpoint."""


@dataclass
class WorkerProcess:
    """One worker's process.

    Attributes:
        number: of all that the job has had, from 0 on.
        seat: the rank with which it was started, or that of the one in whose place it was.
        process: the leader of a session of its own, so that a terminal's signals reach the launcher alone.
        error_file: where the worker leaves why it failed.
        last_signal: the signal that it was last sent; None where it was sent none.
        is_left_behind: whether the others have gone on without it.
    """

    number: int
    seat: int
    process: subprocess.Popen[bytes]
    error_file: Path
    last_signal: signal.Signals | None = None
    is_left_behind: bool = False

    @property
    def status(self) -> int | None:
        """The exit status, −n where signal n killed it; None while it ran when this was last looked at."""
        return self.process.returncode

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error: not well, and not because of a signal."""
        return 0 < (self.status or 0) <= _MAX_STATUS

    def look(self) -> None:
        """See whether it still runs."""
        self.process.poll()

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the worker and to what it has started; wake them where they are stopped."""
        if self.process.poll() is None:
            self.last_signal = number
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends just now
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)
