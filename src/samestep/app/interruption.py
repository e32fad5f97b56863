"""Stopping between two steps: signals and time limits, which all workers heed after the same step.

What a worker wishes for travels with the next step's figures (`Towers.wishes`), so it costs no message, and
one worker that gets a signal is enough to stop all.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from types import FrameType

from samestep.workers.job import Job

__all__ = ["ECHO_S", "Interruption", "Wish", "is_ignored"]

ECHO_S = 1.0
"""Signals up to this many seconds after the first are taken for the same one: a batch system or `timeout`
signals a whole process tree, and a launcher in it passes on what it got."""


class Wish(enum.IntFlag):
    """What a worker may wish for; bits that are OR-ed over all workers."""

    CHECKPOINT = enum.auto()
    TIME_UP = enum.auto()
    SIGHUP = enum.auto()
    SIGINT = enum.auto()
    SIGTERM = enum.auto()

    @property
    def reason(self) -> str | None:
        """Why training should stop: a signal's name, or "--max-seconds"; None where it should not."""
        if self.signal is not None:
            return self.signal.name
        return "--max-seconds" if Wish.TIME_UP in self else None

    @property
    def exit_status(self) -> int:
        """What to exit with after stopping: 128 + the signal's number, or 0."""
        return 0 if self.signal is None else 128 + self.signal

    @property
    def signal(self) -> signal.Signals | None:
        """The signal among the wishes."""
        return next((number for number, wish in _SIGNALS.items() if wish in self), None)


_SIGNALS = {
    signal.SIGTERM: Wish.SIGTERM,
    signal.SIGINT: Wish.SIGINT,
    signal.SIGHUP: Wish.SIGHUP,
}


class Interruption:
    """While it is entered, the first SIGTERM, SIGINT or SIGHUP becomes a wish, and a second one kills.

    Times are measured on worker 0, from when this was made.

    Args:
        job: this process's view of the job.
        max_seconds: wish for the end after so many seconds.
        checkpoint_minutes: wish for a checkpoint every so many minutes.

    Example:
        >>> from samestep import init
        >>> with Interruption(init("cpu"), max_seconds=0) as interruption:
        ...     interruption.wishes()
        <Wish.TIME_UP: 2>
    """

    def __init__(
        self, job: Job, *, max_seconds: float | None = None, checkpoint_minutes: float | None = None
    ) -> None:
        self._is_first = job.is_first
        self._max_s = max_seconds
        self._period_s = None if checkpoint_minutes is None else 60 * checkpoint_minutes
        self._start_s = self._checkpoint_s = time.monotonic()
        self._received = Wish(0)
        self._received_s = 0.0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        for number in _SIGNALS:
            if not is_ignored(number):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._received:  # else the process is about to end: an echo may come, and a second signal
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def wishes(self) -> Wish:
        """Return what this worker wishes for now."""
        wishes, now_s = self._received, time.monotonic()
        if self._is_first and self._max_s is not None and now_s - self._start_s >= self._max_s:
            wishes |= Wish.TIME_UP
        if self._is_first and self._period_s is not None and now_s - self._checkpoint_s >= self._period_s:
            wishes |= Wish.CHECKPOINT
            self._checkpoint_s = now_s
        return wishes

    def heed(self, wishes: Wish) -> None:
        """Take what another worker was sent for a signal to this one: what follows is its echo."""
        if not self._received:
            self._received, self._received_s = wishes, time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A loader process: the worker that it belongs to ends it, after the step.
            if number == signal.SIGTERM:
                _die(number)
        elif not self._received:
            self.heed(_SIGNALS[signal.Signals(number)])
        elif time.monotonic() - self._received_s > ECHO_S:
            _die(number)


def is_ignored(number: signal.Signals) -> bool:
    """Say whether a signal was set to be ignored before and has to stay so: SIGHUP under nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
