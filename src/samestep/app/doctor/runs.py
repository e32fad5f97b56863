"""Subprocesses for trials, started as a user would start them."""

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
from types import FrameType

from samestep.app.interruption import handling
from samestep.app.launching.launch import temporary_folder
from samestep.errors import one_line
from samestep.workers.environment import LIFELINE

__all__ = ["Fault", "Run", "Runs"]

LONGEST_S = 300.0
"""Time limit of a run: most take seconds, or minutes if the disk cache is cold."""

_POLL_S = 0.01
_END_S = 5.0
_MAX_LINES = 12
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Fault(Exception):
    """A failed trial, with the text for the report."""


class Run:
    """A program, the workers that it starts, and their output."""

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
        """The output so far."""
        return self._printed.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The error output so far."""
        return self._complained.read_text(errors="replace")

    def finish(self, wait_s: float | None = None) -> str:
        """Wait, by default `LONGEST_S`, for the program to end, and return its output.

        Raises:
            Fault: the program has failed, or has not ended in time and was killed.
        """
        try:
            status = self._process.wait(LONGEST_S if wait_s is None else wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Fault(f"has not ended within {LONGEST_S:.0f} s{self._last_words()}") from None
        if status:
            raise Fault(f"exit status {status}{self._last_words()}")
        return self.stdout

    def reach(self, step: int) -> None:
        """Wait until the program has printed the line of a step."""
        deadline_s = time.monotonic() + LONGEST_S
        while not re.search(rf": step {step},", self.stdout):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.finish(wait_s=0)
                raise Fault(f"has not reported step {step}{self._last_words()}")
            time.sleep(_POLL_S)

    def workers(self) -> list[int]:
        """Return the ids of the program's child processes, in increasing order."""
        return sorted(pid for pid, parent in _parents() if parent == self._process.pid)

    def kill(self) -> None:
        """Kill the program, and then its workers, before they notice that and end by themselves."""
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
        """Return the last lines of the error output, as a quotation in Markdown."""
        lines = self.stderr.strip().splitlines()[-_MAX_LINES:]
        return "".join(f"\n  > {one_line(line)}" for line in lines)


class Runs:
    """Runs programs in a temporary folder; leaving the `with` block deletes it and kills all processes.

    Raises:
        StorageError: on entering, there is no folder for temporary files.
        SystemExit: inside the block, signal n to this process; the exit status is 128 + n.
    """

    def __init__(self) -> None:
        self._started: list[Run] = []
        self._num_folders = 0

    def __enter__(self) -> Runs:
        with ExitStack() as opened:
            opened.enter_context(handling(_HANDLED, _leave))
            self._folder = opened.enter_context(temporary_folder("samestep-doctor-"))
            self._lifeline, writing = os.pipe()  # closed when this process dies, which ends the programs
            opened.callback(os.close, self._lifeline)
            opened.callback(os.close, writing)
            opened.callback(self._kill_all)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def folder(self) -> Path:
        """Return the path of a new folder, which does not exist yet."""
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
    """Yield the ids of each running process and its parent; nothing if there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = entry.read_text().rpartition(") ")[2].split()[:2]
            if state not in "ZX":
                yield int(entry.parent.name), int(parent)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
