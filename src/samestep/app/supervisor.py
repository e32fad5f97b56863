"""The worker processes of a job on this host: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from samestep.app.interruption import ECHO_S, is_ignored
from samestep.errors import LostWorkerError
from samestep.workers.environment import LIFELINE, seat, worker_environment
from samestep.workers.interrupts import interrupts_held
from samestep.workers.process import GRACE_S, loopback_listener

__all__ = ["Supervisor", "WorkerProcess"]

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.02


@dataclass
class WorkerProcess:
    """One worker's process.

    Attributes:
        rank: of the worker.
        process: the leader of a session of its own, so that a terminal's signals reach the launcher alone.
        error_file: where the worker leaves why it failed.
        told: the signal that it was last sent; None where it was sent none.
    """

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    told: signal.Signals | None = None

    @property
    def status(self) -> int | None:
        """The exit status, −n where signal n killed it; None while it runs."""
        return self.process.poll()

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the worker and to what it has started; wake them where they are stopped."""
        if self.status is None:
            self.told = number
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends just now
                os.killpg(self.process.pid, number)
                os.killpg(self.process.pid, signal.SIGCONT)


class Supervisor:
    """Runs the workers of one job on this host.

    When one fails, the others get SIGTERM; signals to this process are passed on. Workers have `GRACE_S`
    seconds to end before they are killed; a second signal, more than `ECHO_S` after the first, kills at once.
    When this process dies, however that comes, its workers stop as by SIGTERM.

    Args:
        command: the command line of each worker.
        num_workers: processes of the job, W.
        threads: CPU threads of each worker.
        folder: an empty one, in which workers leave why they failed.

    Attributes:
        workers: those that were started, by rank.
        received: the first signal to this process; None where there was none.
    """

    def __init__(self, command: Sequence[str], num_workers: int, *, threads: int, folder: Path) -> None:
        self.workers: list[WorkerProcess] = []
        self.received: signal.Signals | None = None
        self._received_s = 0.0
        self._deadline_s: float | None = None
        self._command = list(command)
        self._num_workers = num_workers
        self._threads = threads
        self._folder = folder

    def run(self) -> None:
        """Start all workers, and return when all have ended.

        Raises:
            LostWorkerError: a worker cannot be started.
        """
        with _lifeline() as lifeline, loopback_listener() as listener, _handling(self._receive):
            try:
                for rank in range(self._num_workers):
                    if self.received is None:
                        self._start(rank, listener.getsockname(), lifeline)
                store = _serve(listener)  # imports torch, as the workers do meanwhile
                self._watch()
                del store
            finally:
                self._end(signal.SIGKILL)
                for worker in self.workers:
                    worker.process.wait()

    def _start(self, rank: int, address: Sequence[object], lifeline: int) -> None:
        host, port = address[:2]
        error_file = self._folder / f"{rank}.json"
        environment = {
            **os.environ,
            **worker_environment(self._threads),
            **seat(rank, self._num_workers, str(host), int(str(port))),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            LIFELINE: str(lifeline),
        }
        try:
            with interrupts_held():
                process = subprocess.Popen(
                    self._command, env=environment, pass_fds=[lifeline], start_new_session=True
                )
        except OSError as error:
            where = f"start of {self._num_workers} workers"
            raise LostWorkerError(f"{where}: worker {rank} could not be started ({error})") from error
        self.workers.append(WorkerProcess(rank, process, error_file))
        if self.received is not None:  # while it was started
            self.workers[-1].end(self.received)

    def _watch(self) -> None:
        """Wait for all to end, and decide what becomes of the others when one has."""
        while any(worker.status is None for worker in self.workers):
            if self._deadline_s is None and any(worker.status for worker in self.workers):
                self._end(signal.SIGTERM)
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                self._end(signal.SIGKILL)
            time.sleep(_POLL_S)

    def _end(self, number: signal.Signals) -> None:
        self._deadline_s = time.monotonic() + GRACE_S
        for worker in self.workers:
            worker.end(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._received_s = signal.Signals(number), now_s
            self._end(self.received)
        elif now_s - self._received_s > ECHO_S:
            self._end(signal.SIGKILL)


@contextmanager
def _lifeline() -> Iterator[int]:
    """Yield the end of a pipe that workers read; it ends when this process does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _serve(listener: socket.socket) -> object:
    """Return the store in which workers find each other."""
    from samestep.workers.store import open_store

    return open_store(listener)


@contextmanager
def _handling(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals for a while. Under nohup, SIGHUP is ignored and has to stay so."""
    before = {number: signal.getsignal(number) for number in _HANDLED if not is_ignored(number)}
    for number in before:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
