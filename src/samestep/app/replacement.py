"""Workers that are lost are left behind, and others come in their place, while the job goes on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.app.failures import Failure
from samestep.app.worker_process import WorkerProcess
from samestep.workers.waiter import Patience

if TYPE_CHECKING:
    from samestep.workers.members import Roster

__all__ = ["Replacement"]

_STOPPED_S = 1.0
"""How long a worker may be stopped, while others run, before it counts as lost."""

_MAX_STATUS = 128
"""Those above are of workers that a signal has stopped, after their last checkpoint."""

_LONGEST_PAUSE_S = 60
_LOOK_S = 0.2


class Replacement:
    """Keeps the list of a job's workers.

    Args:
        roster: the list.
        workers: all that were started; those that `start` starts are added to it.
        start: starts a worker in a seat.
    """

    def __init__(
        self, roster: Roster, workers: Sequence[WorkerProcess], start: Callable[[int], None]
    ) -> None:
        self._roster = roster
        self._workers = workers
        self._start = start
        self._num_first = len(workers)
        self._due_s: dict[int, float] = {}  # when to fill a seat again
        self._num_lost: Counter[int] = Counter()  # by seat
        self._filled_s: dict[int, float] = {}  # when, by seat
        self._suspects: dict[int, Patience] = {}  # of having stopped, by number
        self._looked_s = 0.0

    def look(self) -> None:
        """See who is lost, at once, and who has come, now and then, and say so in the list."""
        present = [worker for worker in self._workers if not worker.is_left_behind]
        has_ended = any(worker.status is not None for worker in present)
        if not has_ended and time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        newcomers = self._newcomers()
        trained = [worker for worker in present if worker not in newcomers]
        running = [worker for worker in trained if worker.status is None]
        finished = {worker.number for worker in trained if self._roster.is_done(worker.number)}
        is_over = bool(finished) or any(worker.status == 0 for worker in trained)
        if is_over:  # a newcomer lacks what the others have done
            self._send_away()
        if not (running or is_over) or not self._roster.go_on(worker.number for worker in trained):
            return
        replaceable = [worker for worker in present if worker.number not in finished]
        if is_over or not all(map(_is_stopped, running)):  # else the whole job is
            self._kill_silent(replaceable)
        lost = [worker for worker in replaceable if worker in trained and (worker.status or 0) < 0]
        self._leave_behind([*lost, *(worker for worker in newcomers if worker.status is not None)])
        if not is_over:
            self._fill_seats()
            self._let_in()

    def end(self) -> None:
        """Let nobody come any more, and those who have been told to stop do so with those who are left."""
        self._send_away()
        members = [self._workers[number] for number in self._roster.members]
        running = [worker.number for worker in members if worker.status is None]
        has_failed = any(0 < (worker.status or 0) <= _MAX_STATUS for worker in members)
        if has_failed or not self._roster.go_on(running):
            self._roster.close()
        else:
            self._leave_behind([])

    def _kill_silent(self, replaceable: Sequence[WorkerProcess]) -> None:
        """Kill those whom others have waited for in vain, and those who are stopped while others run."""
        silent = self._roster.silent()
        for worker in replaceable:
            if worker.status is not None or not (worker.number in silent or _is_stopped(worker)):
                self._suspects.pop(worker.number, None)
            elif self._suspects.setdefault(worker.number, Patience(_STOPPED_S)).is_over():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)

    def _leave_behind(self, lost: Sequence[WorkerProcess]) -> None:
        """Begin a generation without these, and without those who have done their part."""
        for worker in lost:
            worker.is_left_behind = True
            self._free(worker.seat)
            _tell_why(worker)
        members = [self._workers[number] for number in self._roster.members]
        left = [w.number for w in members if w.status is None and not w.is_left_behind]
        if left and (len(left) < len(members) or self._roster.is_asked_again()):
            self._roster.become(left)

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
        members = self._roster.members
        ready = self._roster.ready(w.number for w in self._newcomers() if w.number not in members)
        if ready:
            self._roster.become([*members, *ready])

    def _send_away(self) -> None:
        self._due_s.clear()
        for worker in self._newcomers():
            worker.is_left_behind = True
            worker.end(signal.SIGKILL)

    def _newcomers(self) -> list[WorkerProcess]:
        """Return those that do not train yet, whether or not they are in the list."""
        newcomers = [w for w in self._workers if w.number >= self._num_first and not w.is_left_behind]
        return [worker for worker in newcomers if not self._roster.go_on([worker.number])]


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
