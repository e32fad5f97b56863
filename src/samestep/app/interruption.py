"""Stopping between two steps: on a signal or a time limit, all workers stop after the same step.

A worker's stop flags are sent with the next step's scalars (`Step.__call__`), so they cost no message, and a
signal to one worker stops all.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.workers.job import Job

__all__ = ["ECHO_S", "Interruption", "StopFlags", "handling", "is_ignored"]

ECHO_S = 1.0
"""Signals within this many seconds of the first count as the same one: a batch system or `timeout` signals a
whole process tree, and a launcher in that tree forwards its own signal."""


class StopFlags(enum.IntFlag):
    """What a worker requests of all workers after the current step; the flags of all workers are OR-ed."""

    CHECKPOINT = enum.auto()
    TIME_UP = enum.auto()
    SIGHUP = enum.auto()
    SIGINT = enum.auto()
    SIGTERM = enum.auto()
    ENOUGH = enum.auto()
    REGROUP = enum.auto()

    @property
    def reason(self) -> str | None:
        """Why training should stop: a signal's name, or "--max-seconds"; None if neither asks for it."""
        if self.signal is not None:
            return self.signal.name
        return "--max-seconds" if StopFlags.TIME_UP in self else None

    @property
    def exit_status(self) -> int:
        """The exit status after stopping: 128 + the signal's number, or 0."""
        return 0 if self.signal is None else 128 + self.signal

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that asks to stop; None if there is none."""
        return next((number for number, flag in _SIGNALS.items() if flag in self), None)


_SIGNALS = {
    signal.SIGTERM: StopFlags.SIGTERM,
    signal.SIGINT: StopFlags.SIGINT,
    signal.SIGHUP: StopFlags.SIGHUP,
}


class Interruption:
    """Turns signals and time limits into stop flags.

    Inside the `with` block, the first SIGTERM, SIGINT or SIGHUP sets a stop flag, and a second one, more than
    `ECHO_S` later, kills the process. SIGINT and SIGHUP stay ignored if this process ignores them. In a
    thread other than the main one, signals are left alone, because Python handles them in the main thread
    only. Times are measured on worker 0, from construction on.

    Args:
        job: this process's view of the job.
        max_seconds: request a stop after this many seconds.
        checkpoint_minutes: request a checkpoint every so many minutes.

    Example:
        >>> from samestep import init
        >>> with Interruption(init("cpu"), max_seconds=0) as interruption:
        ...     interruption.flags()
        <StopFlags.TIME_UP: 2>
    """

    def __init__(
        self, job: Job, *, max_seconds: float | None = None, checkpoint_minutes: float | None = None
    ) -> None:
        self._job = job
        self._max_s = max_seconds
        self._period_s = None if checkpoint_minutes is None else 60 * checkpoint_minutes
        self._start_s = self._checkpoint_s = time.monotonic()
        self._received = StopFlags(0)
        self._received_s = 0.0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS:
            if is_main and not is_ignored(number):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start_s

    def start_earlier(self, elapsed_s: float) -> None:
        """Use the elapsed time of a worker that started earlier than this one."""
        self._start_s = min(self._start_s, time.monotonic() - elapsed_s)

    def end(self) -> None:
        """Restore the former signal handlers, unless a signal has been received.

        After a signal the process is about to end, and repeats of that signal or a second one may follow.
        """
        if not self._received:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def flags(self) -> StopFlags:
        """Return what this worker requests now."""
        flags, now_s = self._received, time.monotonic()
        if self._job.is_first and self._max_s is not None and now_s - self._start_s >= self._max_s:
            flags |= StopFlags.TIME_UP
        if self._job.is_first and self._period_s is not None and now_s - self._checkpoint_s >= self._period_s:
            flags |= StopFlags.CHECKPOINT
            self._checkpoint_s = now_s
        return flags

    def acknowledge(self, flags: StopFlags) -> None:
        """Treat a signal to another worker as received here: this worker may get the same one soon after."""
        if not self._received:
            self._received, self._received_s = flags, time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked loader process: its worker ends it by SIGTERM after the step. Ignore other signals.
            if number == signal.SIGTERM:
                _die(number)
        elif not self._received:
            self.acknowledge(_SIGNALS[signal.Signals(number)])
        elif time.monotonic() - self._received_s > ECHO_S:
            _die(number)


def is_ignored(number: signal.Signals) -> bool:
    """Return whether a signal must stay ignored: SIGHUP under nohup, SIGINT after a shell's `&`."""
    return number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], receive: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals with `receive` inside the block, except those that must stay ignored."""
    before = {number: signal.getsignal(number) for number in numbers if not is_ignored(number)}
    for number in before:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
