"""The worker processes of a job on this host: started, watched, replaced and ended together.

If a signal kills a worker, and all others can continue without it (see `samestep.workers.members`), they do,
and a newcomer replaces it. Any other failure of a worker ends all. A job of several hosts has a supervisor on
each host.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from samestep.app.interruption import ECHO_S, handling
from samestep.app.launching.nodes import Nodes
from samestep.app.launching.place import OneHost
from samestep.app.launching.worker_process import WorkerProcess
from samestep.errors import LostWorkerError
from samestep.workers.environment import LIFELINE, NUMBER, PER_HOST, worker_environment
from samestep.workers.interrupts import interrupts_held
from samestep.workers.listeners import loopback_listener
from samestep.workers.process import GRACE_S

if TYPE_CHECKING:
    from samestep.app.launching.host_rendezvous import Rendezvous
    from samestep.app.launching.hosts import Ending, Hosts
    from samestep.app.launching.roster import Roster

__all__ = ["Supervisor"]

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.02
_MEET_POLL_S = 0.1


class Supervisor:
    """Runs the workers of one job on this host.

    A worker that was killed, or stopped for a second while others run, is replaced if all others can continue
    without it. If a worker fails in another way, the others get SIGTERM. Signals to this process are passed
    on to the workers. They have `GRACE_S` seconds to end before they are killed; a second signal, more than
    `ECHO_S` after the first, kills them at once. If this process dies in any way, its workers get SIGTERM; in
    a job of several hosts they are killed, because the other hosts continue without this one.

    Args:
        command: the command line of each worker.
        num_workers: number of worker processes on this host.
        threads: CPU threads of each worker.
        folder: an empty folder, in which workers write why they failed.
        nodes: the options of a job of several hosts; None for a single host.

    Attributes:
        workers: all workers that were started, in that order.
        received: the first signal to this process; None if there was none.
        ending: how another host has ended the job; None if none has.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        *,
        threads: int,
        folder: Path,
        nodes: Nodes | None = None,
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self.received: signal.Signals | None = None
        self.ending: Ending | None = None
        self._received_s = 0.0
        self._deadline_s: float | None = None
        self._command = list(command)
        self._num_workers = num_workers
        self._threads = threads
        self._folder = folder
        self._nodes = nodes

    def run(self) -> None:
        """Start all workers, and return when all have ended.

        Raises:
            ConfigError: this host was started with other options than the job that it would join.
            LostWorkerError: a worker cannot be started; the other hosts did not come, or this host cannot
                continue without them.
        """
        with _lifeline() as self._lifeline, handling(_HANDLED, self._receive), ExitStack() as stack:
            meeting = self._meet(stack)
            if meeting is None:
                return
            self._place = meeting.place
            try:
                for local_rank in range(self._num_workers):
                    if self.received is None:
                        self._start(local_rank)
                self._watch(meeting)  # imports torch, after the workers have started to do the same
            finally:
                self._end(signal.SIGKILL)
                for worker in self.workers:
                    worker.process.wait()
                meeting.leave()

    def _meet(self, stack: ExitStack) -> OneHost | Rendezvous | None:
        """Meet the other hosts; None if a signal came first."""
        if self._nodes is None:
            return OneHost(stack.enter_context(loopback_listener()), self._num_workers)
        from samestep.app.launching.host_rendezvous import Rendezvous
        from samestep.workers.waiter import Waiter

        found: list[Rendezvous] = []
        waiter, nodes = Waiter(math.inf), self._nodes
        waiting = waiter.start([(None, lambda: found.append(Rendezvous(nodes, self._num_workers)))])
        while self.received is None and not waiting.is_done(_MEET_POLL_S):
            pass
        waiter.close()
        if waiting.error is not None:
            raise waiting.error
        return found[0] if self.received is None else None

    def _start(self, local_rank: int) -> None:
        number = self._place.host * PER_HOST + len(self.workers)
        error_file = self._folder / f"{number}.json"
        environment = {
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # no pages of C++ frames if the launcher is killed
            **os.environ,
            **worker_environment(self._threads),
            **self._place.environment(local_rank, self._num_workers),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            LIFELINE: f"{self._lifeline}:{signal.SIGTERM if self._nodes is None else signal.SIGKILL:d}",
            NUMBER: str(number),
        }
        try:
            with interrupts_held():
                process = subprocess.Popen(
                    self._command, env=environment, pass_fds=[self._lifeline], start_new_session=True
                )
        except OSError as error:
            where = f"start of {self._num_workers} workers"
            raise LostWorkerError(f"{where}: worker {local_rank} could not be started ({error})") from error
        self.workers.append(WorkerProcess(number, local_rank, process, error_file))
        if self.received is not None:  # a signal came before the worker was in the list
            self.workers[-1].end(self.received)

    def _watch(self, meeting: OneHost | Rendezvous) -> None:
        """Wait for all workers to end; replace lost workers, or end all if one fails."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from samestep.app.launching.hosts import Hosts
        from samestep.app.launching.replacement import Replacement
        from samestep.app.launching.roster import Roster

        place = meeting.place
        store = PrefixStore(place.job, meeting.open())
        hosts, roster = Hosts(store, place.host), Roster(store, self._members())
        most_workers = None if self._nodes is None else self._nodes.most_workers
        replacement = Replacement(roster, hosts, self.workers, self._start, most_workers)
        while True:
            if self._deadline_s is None:
                replacement.look()
                self._end_with(hosts)
            else:
                replacement.end()
                if time.monotonic() > self._deadline_s:
                    self._end(signal.SIGKILL)
            if not (replacement.is_due or any(worker.status is None for worker in self.workers)):
                break
            time.sleep(_POLL_S)
            for worker in self.workers:
                worker.look()
        self._leave(meeting, hosts, roster)

    def _members(self) -> Sequence[int] | None:
        """Return the first list of workers; None if this host joins a job that has begun."""
        if self._nodes is None:
            return range(len(self.workers))  # a signal may have come before all were started
        return self._place.members

    def _end_with(self, hosts: Hosts) -> None:
        """End all workers if one has failed, here or on another host."""
        failed = [worker for worker in self.workers if worker.status and not worker.is_left_behind]
        causes = [worker.status for worker in failed if worker.has_failed or (worker.status or 0) < 0]
        if causes:
            hosts.end("failed", max(1, causes[0] or 0))
        if failed or hosts.ending is not None:
            self._end(signal.SIGTERM)

    def _leave(self, meeting: OneHost | Rendezvous, hosts: Hosts, roster: Roster) -> None:
        """Leave the job; the host with the store leaves last."""
        with suppress(LostWorkerError):
            if self.received is not None:
                hosts.end(f"was stopped by {self.received.name}", 128 + self.received)
            hosts.look()
            roster.without(worker.number for worker in self.workers)
            meeting.close()
            hosts.leave()
            if meeting.has_store:
                received_s = self._received_s
                hosts.wait_for_others(lambda: self._received_s > received_s)
        self.ending = hosts.ending

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
            self._received_s = now_s
            self._end(signal.SIGKILL)


@contextmanager
def _lifeline() -> Iterator[int]:
    """Yield the read end of a pipe, by which workers notice that this process has died."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
