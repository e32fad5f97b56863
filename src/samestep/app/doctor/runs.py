"""Programs that are run for a trial, each as a user starts it, and killed where a trial says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType

from samestep.app.interruption import handling
from samestep.app.launching.launch import temporary_folder
from samestep.errors import one_line
from samestep.workers.environment import LIFELINE

__all__ = ["Fault", "Run", "Runs"]

LONGEST_S = 300.0
"""How long a run may take: most take seconds, or minutes with a cold disk."""

_POLL_S = 0.01
_END_S = 5.0
_MAX_LINES = 12
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Fault(Exception):
    """What does not hold, in words for the report."""


class Run:
    """A program, its workers if it starts some, and what they print."""

    def __init__(self, words: Sequence[str], folder: Path, lifeline: int) -> None:
        self._printed = folder / "stdout"
        self._complained = folder / "stderr"
        with self._printed.open("wb") as out, self._complained.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder), LIFELINE: str(lifeline)},
                pass_fds=[lifeline],
                start_new_session=True,  # a terminal's signals reach the doctor alone
            )

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed so far as errors."""
        return self._complained.read_text(errors="replace")

    def finish(self) -> str:
        """Wait until it has ended, and return what it has printed."""
        try:
            status = self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Fault(f"has not ended within {LONGEST_S:.0f} s{self._last_words()}") from None
        if status:
            raise Fault(f"exit status {status}{self._last_words()}")
        return self.stdout

    def reach(self, step: int) -> None:
        """Wait until it has told of a step."""
        deadline_s = time.monotonic() + LONGEST_S
        while not re.search(rf": step {step},", self.stdout):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.finish()
                raise Fault(f"has not reported step {step}{self._last_words()}")
            time.sleep(_POLL_S)

    def workers(self) -> list[int]:
        """Return the processes that it has started, in that order."""
        return sorted(pid for pid, parent in _parents() if parent == self._process.pid)

    def kill(self) -> None:
        """Kill it, and then its workers, before they can end as they do without it."""
        workers = self.workers() if self._process.poll() is None else []
        self._process.kill()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
        self._process.wait()
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s and any(pid in workers for pid, _ in _parents()):
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        """Return the end of what it has printed as errors, as a quotation in Markdown."""
        lines = self.stderr.strip().splitlines()[-_MAX_LINES:]
        return "".join(f"\n  > {one_line(line)}" for line in lines)


class Runs:
    """Runs programs in a folder of their own, of which nothing is left: neither files nor processes.

    Raises:
        StorageError: on entering, there is no folder for temporary files.
        SystemExit: a signal to this process, while it is entered; 128 + its number.
    """

    def __init__(self) -> None:
        self._started: list[Run] = []
        self._num_folders = 0

    def __enter__(self) -> Runs:
        with ExitStack() as opened:
            opened.enter_context(handling(_HANDLED, _leave))
            self._folder = opened.enter_context(temporary_folder("samestep-doctor-"))
            self._lifeline, writing = os.pipe()  # which ends with this process: then they stop, too
            opened.callback(os.close, self._lifeline)
            opened.callback(os.close, writing)
            opened.callback(self._kill_all)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def folder(self) -> Path:
        """Return where a new folder can be made."""
        self._num_folders += 1
        return self._folder / str(self._num_folders)

    def start(self, *words: object) -> Run:
        """Start `python WORDS`."""
        folder = self.folder()
        try:
            folder.mkdir()
            self._started.append(Run([*map(str, words)], folder, self._lifeline))
        except OSError as error:
            raise Fault(f"cannot be started: {error}") from error
        return self._started[-1]

    def _kill_all(self) -> None:
        for run in self._started:
            run.kill()


def _parents() -> Iterator[tuple[int, int]]:
    """Yield each process that runs, and its parent; none where there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = entry.read_text().rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                yield int(entry.parent.name), int(parent)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
