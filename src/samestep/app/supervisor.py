"""The worker processes of a job on this host: started, watched, replaced and ended together.

Where all others can go on without a worker that a signal has killed (see `samestep.workers.members`), they
do, and a newcomer is started in its place; otherwise one that fails ends all.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from samestep.app.interruption import ECHO_S, is_ignored
from samestep.app.replacement import Replacement
from samestep.app.worker_process import WorkerProcess
from samestep.errors import LostWorkerError
from samestep.workers.environment import LIFELINE, NUMBER, seat_environment, worker_environment
from samestep.workers.interrupts import interrupts_held
from samestep.workers.process import GRACE_S, loopback_listener

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from samestep.workers.members import Roster

__all__ = ["Supervisor"]

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.02


class Supervisor:
    """Runs the workers of one job on this host.

    One that was killed, or stopped for a second while others run, is replaced, if all others go on without
    it. When one fails otherwise, the others get SIGTERM; signals to this process are passed on. Workers have
    `GRACE_S` seconds to end before they are killed; a second signal, more than `ECHO_S` after the first,
    kills at once. When this process dies, however that comes, its workers stop as by SIGTERM.

    Args:
        command: the command line of each worker.
        num_workers: processes of the job, W.
        threads: CPU threads of each worker.
        folder: an empty one, in which workers leave why they failed.

    Attributes:
        workers: those that were started, in that order.
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
        with _lifeline() as self._lifeline, loopback_listener() as listener, _handling(self._receive):
            try:
                self._address = listener.getsockname()[:2]
                for seat in range(self._num_workers):
                    if self.received is None:
                        self._start(seat)
                store = _serve(listener)  # imports torch, as the workers do meanwhile
                self._watch(_roster(store, len(self.workers)))
                del store
            finally:
                self._end(signal.SIGKILL)
                for worker in self.workers:
                    worker.process.wait()

    def _start(self, seat: int) -> None:
        host, port = self._address
        number = len(self.workers)
        error_file = self._folder / f"{number}.json"
        environment = {
            **os.environ,
            **worker_environment(self._threads),
            **seat_environment(seat, self._num_workers, str(host), int(port)),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            LIFELINE: str(self._lifeline),
            NUMBER: str(number),
        }
        try:
            with interrupts_held():
                process = subprocess.Popen(
                    self._command, env=environment, pass_fds=[self._lifeline], start_new_session=True
                )
        except OSError as error:
            where = f"start of {self._num_workers} workers"
            raise LostWorkerError(f"{where}: worker {seat} could not be started ({error})") from error
        self.workers.append(WorkerProcess(number, seat, process, error_file))
        if self.received is not None:  # while it was started
            self.workers[-1].end(self.received)

    def _watch(self, roster: Roster) -> None:
        """Wait for all to end, and decide what becomes of the others when one has."""
        replacement = Replacement(roster, self.workers, self._start)
        while any(worker.status is None for worker in self.workers):
            if self._deadline_s is None:
                replacement.look()
                if any(worker.status and not worker.is_left_behind for worker in self.workers):
                    self._end(signal.SIGTERM)
            else:
                replacement.end()
                if time.monotonic() > self._deadline_s:
                    self._end(signal.SIGKILL)
            time.sleep(_POLL_S)
            for worker in self.workers:
                worker.look()

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


def _serve(listener: socket.socket) -> Store:
    """Return the store in which workers find each other."""
    from samestep.workers.store import open_store

    return open_store(listener)


def _roster(store: Store, num_workers: int) -> Roster:
    from samestep.workers.members import Roster

    return Roster(store, range(num_workers))


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
