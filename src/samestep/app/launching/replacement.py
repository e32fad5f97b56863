"""Replacing lost workers while the job continues."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.app.launching.failures import Failure
from samestep.app.launching.hosts import CUT_S, Hosts
from samestep.app.launching.roster import Roster
from samestep.app.launching.worker_process import WorkerProcess
from samestep.errors import LostWorkerError
from samestep.workers.members import host_of
from samestep.workers.waiter import Patience

__all__ = ["Replacement"]

_STOPPED_S = 1.0
"""How long a worker may be stopped (as by SIGSTOP) while others run, before it counts as lost."""

_LONGEST_PAUSE_S = 60
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Seen:
    """The states of the workers on this host and on the others at one time."""

    newcomers: set[int]  # workers on any host that do not train yet
    trained: Sequence[WorkerProcess]  # workers on this host that are not newcomers
    running: Sequence[WorkerProcess]  # those of `trained` that still run
    replaceable: Sequence[WorkerProcess]  # workers on this host that have not finished their part
    gone: Sequence[int]  # members on lost hosts
    elsewhere: Sequence[int]  # members on other hosts that are not lost
    is_over: bool  # whether a worker has come to the end

    @property
    def can_any_go_on(self) -> bool:
        """Whether there is a worker that can continue, or one that has come to the end."""
        return bool(self.running or set(self.elsewhere) - self.newcomers or self.is_over)

    @property
    def who_trained(self) -> list[int]:
        """The numbers of all workers on any host that are not newcomers, including lost ones."""
        others = {*self.gone, *self.elsewhere} - self.newcomers
        return [*others, *(worker.number for worker in self.trained)]

    @property
    def is_all_stopped(self) -> bool:
        """Whether all workers are stopped, as after Ctrl-Z, so that none of them counts as lost."""
        return not (self.is_over or self.elsewhere) and all(map(_is_stopped, self.running))

    def lost(self) -> list[WorkerProcess]:
        """Return the lost workers that can be replaced: killed by a signal, or newcomers that failed."""
        failed = [worker for worker in self.replaceable if worker.status is not None]
        return [worker for worker in failed if worker.number in self.newcomers or (worker.status or 0) < 0]


class Replacement:
    """Maintains this host's workers in the list of a job's workers, and removes lost hosts from the list.

    Args:
        roster: the list of workers.
        hosts: the hosts of the job.
        workers: all workers started on this host; `start` appends to it.
        start: starts a worker with a local rank.
        most_workers: largest number of workers in the job; None for no limit.
    """

    def __init__(
        self,
        roster: Roster,
        hosts: Hosts,
        workers: Sequence[WorkerProcess],
        start: Callable[[int], None],
        most_workers: int | None = None,
    ) -> None:
        self._roster = roster
        self._hosts = hosts
        self._workers = workers
        self._start = start
        self._most_workers = most_workers
        self._due_s: dict[int, float] = {}  # by local rank: when to start a new worker
        self._num_lost: Counter[int] = Counter()  # by local rank: workers lost in a row
        self._started_s: dict[int, float] = {}  # by local rank: when the last new worker was started
        self._suspects: dict[int, Patience] = {}  # by number: workers that may be stopped or hang
        self._looked_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a new worker is to be started."""
        return bool(self._due_s)

    def look(self) -> None:
        """Remove lost workers from the list and add newcomers; a lost worker here is noticed at once.

        Raises:
            LostWorkerError: this host cannot continue: another host or the store is lost, or the other hosts
                have continued without this one.
        """
        present = [worker for worker in self._workers if not worker.is_left_behind]
        has_ended = any(worker.status is not None for worker in present)
        if not (has_ended or self._is_time()):
            return
        self._look_around()
        if self._hosts.ending is not None:
            return
        seen = self._see(present)
        if seen.is_over:  # a newcomer lacks what the others have done
            self._send_away()
        if not (seen.can_any_go_on and self._roster.go_on(seen.who_trained)):
            self._check_there(seen.gone)
            return
        self._check_belongs([] if seen.is_over else seen.running)
        if not seen.is_all_stopped:
            self._kill_silent(seen.replaceable)
        self._end(self._roster.sent_away(seen.newcomers))
        self._leave_behind(seen.lost(), seen.gone, is_over=seen.is_over)
        if not seen.is_over:
            self._start_due()
            self._let_in()

    def _see(self, present: Sequence[WorkerProcess]) -> _Seen:
        newcomers = self._roster.newcomers({*self._roster.members, *(worker.number for worker in present)})
        trained = [worker for worker in present if worker.number not in newcomers]
        is_over = self._roster.is_over() or any(worker.status == 0 for worker in trained)
        running = [worker for worker in trained if worker.status is None]
        finished = {worker.number for worker in trained if self._roster.is_done(worker.number)}
        replaceable = [worker for worker in present if worker.number not in finished]
        gone, elsewhere = self._elsewhere()
        return _Seen(newcomers, trained, running, replaceable, gone, elsewhere, is_over)

    def end(self) -> None:
        """Admit no more newcomers, and let workers that were told to stop end with the remaining members."""
        if not self._is_time():
            return
        self._look_around()
        self._send_away()
        members = [worker for worker in self._workers if worker.number in self._roster.members]
        running = [worker.number for worker in members if worker.status is None]
        has_failed = any(worker.has_failed for worker in members)
        if has_failed or not self._roster.go_on(running):
            self._roster.close()
        else:
            self._leave_behind([], self._elsewhere()[0], is_over=True)

    def _is_time(self) -> bool:
        is_time = time.monotonic() - self._looked_s >= _LOOK_S
        if is_time:
            self._looked_s = time.monotonic()
        return is_time

    def _look_around(self) -> None:
        self._roster.look()
        self._hosts.look(self._roster.cut(self._hosts.own))

    def _elsewhere(self) -> tuple[list[int], list[int]]:
        """Return the members on lost hosts, and those on other hosts that are not lost."""
        members = [number for number in self._roster.members if host_of(number) != self._hosts.own]
        gone = [number for number in members if host_of(number) in self._hosts.lost]
        return gone, [number for number in members if number not in gone]

    def _check_there(self, gone: Sequence[int]) -> None:
        """Raise if a host is lost without which the others cannot continue."""
        if gone:
            name = self._hosts.names[host_of(gone[0])]
            raise LostWorkerError(f"the host {name} was lost before the job could go on without it")

    def _check_belongs(self, running: Sequence[WorkerProcess]) -> None:
        """Raise if the other hosts have removed this host's workers, because it was silent for too long."""
        members = self._roster.members
        if members and any(worker.number not in members for worker in running):
            raise LostWorkerError(
                f"the other hosts went on without this one after hearing nothing from it for {CUT_S:g} s or "
                "more: its workers were ended; run the same command again to join them"
            )

    def _kill_silent(self, replaceable: Sequence[WorkerProcess]) -> None:
        """Kill workers that others have waited for until the timeout, and those stopped while others run."""
        silent = self._roster.silent()
        for worker in replaceable:
            if worker.status is not None or not (worker.number in silent or _is_stopped(worker)):
                self._suspects.pop(worker.number, None)
            elif self._suspects.setdefault(worker.number, Patience(_STOPPED_S)).is_over():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)

    def _end(self, numbers: Sequence[int]) -> None:
        for worker in self._workers:
            if worker.number in numbers:
                worker.end(signal.SIGKILL)

    def _leave_behind(self, lost: Sequence[WorkerProcess], gone: Sequence[int], *, is_over: bool) -> None:
        """Start a generation without the lost workers, and without those that have ended."""
        out = [w.number for w in self._workers if w.status is not None or w.is_left_behind]
        if not self._roster.without([*out, *gone]) and not is_over:
            return  # no member would be left
        for host in dict.fromkeys(map(host_of, gone)):
            sys.stderr.write(f"samestep: the host {self._hosts.names[host]} is lost; going on without it\n")
        for worker in lost:
            worker.is_left_behind = True
            self._schedule(worker.local_rank)
            _explain_newcomer(worker)
        if self._roster.is_asked_again():
            self._roster.begin_again()

    def _schedule(self, local_rank: int) -> None:
        """Schedule a new worker: at once, but with exponential backoff for repeated losses."""
        now_s = time.monotonic()
        if now_s - self._started_s.get(local_rank, now_s) > _LONGEST_PAUSE_S:
            self._num_lost[local_rank] = 0
        self._due_s[local_rank] = now_s + min(2 ** self._num_lost[local_rank] - 1, _LONGEST_PAUSE_S)
        self._num_lost[local_rank] += 1

    def _start_due(self) -> None:
        for local_rank, due_s in list(self._due_s.items()):
            if time.monotonic() >= due_s:
                del self._due_s[local_rank]
                self._started_s[local_rank] = time.monotonic()
                self._start(local_rank)

    def _let_in(self) -> None:
        waiting = [w.number for w in self._newcomers() if w.number not in self._roster.members]
        ready = self._roster.ready(waiting)
        if ready:
            self._roster.let_in(ready, self._most_workers)

    def _send_away(self) -> None:
        self._due_s.clear()
        for worker in self._newcomers():
            worker.is_left_behind = True
            worker.end(signal.SIGKILL)

    def _newcomers(self) -> list[WorkerProcess]:
        """Return this host's workers that do not train yet, whether or not they are in the list."""
        present = {worker.number: worker for worker in self._workers if not worker.is_left_behind}
        return [present[number] for number in sorted(self._roster.newcomers(present))]


def _explain_newcomer(worker: WorkerProcess) -> None:
    """Print why a newcomer could not join, unless it was killed."""
    if (worker.status or 0) > 0:
        failure = Failure.read(worker.error_file)
        sys.stderr.write("" if failure is None else failure.text)
        sys.stderr.write(f"samestep: a new worker exited with status {worker.status}; going on without it\n")


def _is_stopped(worker: WorkerProcess) -> bool:
    """Return whether a signal has stopped a process; always False on systems without /proc."""
    try:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] == "T"
