"""Workers that are lost are left behind, and others come in their place, while the job goes on."""

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
"""How long a worker may be stopped, while others run, before it counts as lost."""

_LONGEST_PAUSE_S = 60
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Seen:
    """How this host's workers stand at one time, and those of the others."""

    newcomers: set[int]  # who do not train yet, on any host
    trained: Sequence[WorkerProcess]  # of this host
    running: Sequence[WorkerProcess]  # of these
    replaceable: Sequence[WorkerProcess]  # of this host, who have not done all that there is to do
    gone: Sequence[int]  # members on lost hosts
    elsewhere: Sequence[int]  # members on other hosts that are there
    is_over: bool  # whether somebody has come to the end

    @property
    def has_left(self) -> bool:
        """Whether somebody is there who can go on."""
        return bool(self.running or set(self.elsewhere) - self.newcomers or self.is_over)

    @property
    def who_trained(self) -> list[int]:
        """All who have trained, on any host, lost ones included."""
        others = {*self.gone, *self.elsewhere} - self.newcomers
        return [*others, *(worker.number for worker in self.trained)]

    @property
    def is_all_stopped(self) -> bool:
        """Whether the whole job stands still, as after Ctrl-Z, and not some of its workers."""
        return not (self.is_over or self.elsewhere) and all(map(_is_stopped, self.running))

    def lost(self) -> list[WorkerProcess]:
        """Return whom the others can go on without: those that were killed, and newcomers that failed."""
        failed = [worker for worker in self.replaceable if worker.status is not None]
        return [worker for worker in failed if worker.number in self.newcomers or (worker.status or 0) < 0]


class Replacement:
    """Keeps this host's part of the list of a job's workers, and takes lost hosts out of it.

    Args:
        roster: the list.
        hosts: of the job.
        workers: all that were started here; those that `start` starts are added to it.
        start: starts a worker in a seat.
        most_workers: how many the job can have.
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
        self._due_s: dict[int, float] = {}  # when to fill a seat again
        self._num_lost: Counter[int] = Counter()  # by seat
        self._filled_s: dict[int, float] = {}  # when, by seat
        self._suspects: dict[int, Patience] = {}  # of having stopped, by number
        self._looked_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a seat is to be filled."""
        return bool(self._due_s)

    def look(self) -> None:
        """See who is lost, at once, and who has come, now and then, and say so in the list.

        Raises:
            LostWorkerError: this host cannot go on: without another one, without the store, or because the
                others have gone on without it.
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
        if not (seen.has_left and self._roster.go_on(seen.who_trained)):
            self._check_there(seen.gone)
            return
        self._check_belongs([] if seen.is_over else seen.running)
        if not seen.is_all_stopped:
            self._kill_silent(seen.replaceable)
        self._end(self._roster.sent_away(seen.newcomers))
        self._leave_behind(seen.lost(), seen.gone, is_over=seen.is_over)
        if not seen.is_over:
            self._fill_seats()
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
        """Let nobody come any more, and those who have been told to stop do so with those who are left."""
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
        """Return the members of lost hosts, and those of other hosts that are there."""
        members = [number for number in self._roster.members if host_of(number) != self._hosts.own]
        gone = [number for number in members if host_of(number) in self._hosts.lost]
        return gone, [number for number in members if number not in gone]

    def _check_there(self, gone: Sequence[int]) -> None:
        """Raise where a host is lost without which the others cannot go on."""
        if gone:
            name = self._hosts.names[host_of(gone[0])]
            raise LostWorkerError(f"the host {name} was lost before the job could go on without it")

    def _check_belongs(self, running: Sequence[WorkerProcess]) -> None:
        """Raise where the others have left this host behind, as they heard nothing of it for a while."""
        members = self._roster.members
        if members and any(worker.number not in members for worker in running):
            raise LostWorkerError(
                f"the other hosts went on without this one after hearing nothing from it for {CUT_S:g} s or "
                "more: its workers were ended; run the same command again to join them"
            )

    def _kill_silent(self, replaceable: Sequence[WorkerProcess]) -> None:
        """Kill those whom others have waited for in vain, and those who are stopped while others run."""
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
        """Begin a generation without these, and without those who have done their part."""
        out = [w.number for w in self._workers if w.status is not None or w.is_left_behind]
        if not self._roster.without([*out, *gone]) and not is_over:
            return  # nobody would be left
        for host in dict.fromkeys(map(host_of, gone)):
            sys.stderr.write(f"samestep: the host {self._hosts.names[host]} is lost; going on without it\n")
        for worker in lost:
            worker.is_left_behind = True
            self._free(worker.seat)
            _tell_why(worker)
        if self._roster.is_asked_again():
            self._roster.begin_again()

    def _free(self, seat: int) -> None:
        """Have a seat filled: at once, and later each time, should whoever sits there never last."""
        now_s = time.monotonic()
        if now_s - self._filled_s.get(seat, now_s) > _LONGEST_PAUSE_S:
            self._num_lost[seat] = 0
        self._due_s[seat] = now_s + min(2 ** self._num_lost[seat] - 1, _LONGEST_PAUSE_S)
        self._num_lost[seat] += 1

    def _fill_seats(self) -> None:
        for seat, due_s in list(self._due_s.items()):
            if time.monotonic() >= due_s:
                del self._due_s[seat]
                self._filled_s[seat] = time.monotonic()
                self._start(seat)

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
        """Return those that do not train yet, whether or not they are in the list."""
        present = {worker.number: worker for worker in self._workers if not worker.is_left_behind}
        return [present[number] for number in sorted(self._roster.newcomers(present))]


def _tell_why(worker: WorkerProcess) -> None:
    """Say why a newcomer could not join, unless it was killed."""
    if (worker.status or 0) > 0:
        failure = Failure.read(worker.error_file)
        sys.stderr.write("" if failure is None else failure.text)
        sys.stderr.write(f"samestep: a newcomer exited with status {worker.status}; going on without it\n")


def _is_stopped(worker: WorkerProcess) -> bool:
    """Say whether a signal has stopped a process; only Linux tells."""
    try:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] == "T"
