"""Waits for other workers, while this worker can be interrupted and detects which workers are gone."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol, TypeVar

from samestep.errors import Error, LostWorkerError
from samestep.workers.environment import launched_by_samestep
from samestep.workers.peers import Peers

__all__ = ["Call", "Patience", "Wait", "Waiter", "Waiting", "end_with_threads", "in_thread"]

_SLICE_S = 0.1
_GRACE_S = 1.0
"""How long a message may still be in flight after its sender has ended."""

_APART_S = 2.0
"""How much longer each rank waits for its thread at exit than the rank before it, whose exit takes a while.

Not used under samestep's launcher, where `end_with_threads` ends the process.
"""

_ANNOUNCED_WITHIN_S = 0.02
"""How long to wait for the announcement of a worker that noticed a loss first and exited."""

_left: list[threading.Thread] = []
"""Threads that were left waiting in C++, perhaps forever."""

T = TypeVar("T")
Call = tuple[int | None, Callable[[], object]]
"""The worker that a call waits for, and the call itself, which blocks in C++."""


class Waiting(Protocol):
    """Something to wait for that depends on other workers."""

    @property
    def worker(self) -> int | None:
        """The worker that it is waiting for; None if unknown."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""

    def is_done(self, timeout_s: float) -> bool:
        """Wait until it has ended or failed, for about this long; return whether it has."""


class Patience:
    """A timeout that does not count time during which the process was stopped.

    Call `is_over` every 0.1 s or so: a much longer interval is taken for a stop.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = self._left_s = timeout_s
        self._most_s = min(1.0, timeout_s / 4)
        self._asked_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the timeout has passed."""
        before_s, self._asked_s = self._asked_s, time.monotonic()
        self._left_s -= min(self._asked_s - before_s, self._most_s)
        return self._left_s <= 0


def in_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Make a call that blocks in C++ in a new thread; see `Waiter.call`."""
    waiter = Waiter(timeout_s)
    try:
        return waiter.call(work)
    finally:
        waiter.close()


def end_with_threads(status: int) -> None:
    """Exit at once if a thread still waits in C++: if it wakes during shutdown, it aborts the process."""
    if any(thread.is_alive() for thread in _left):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


class Waiter:
    """Makes calls that block in C++ in its own thread, one after the other.

    The main thread can then handle signals while it waits; Python cannot do that during a call in C++.

    Args:
        timeout_s: how long to wait for a worker.
        rank: this worker's rank.

    Attributes:
        peers: knows which workers are gone, and which errors they have announced.
        silent: the worker that did not answer within the timeout; None if all did.
    """

    def __init__(self, timeout_s: float, rank: int = 0) -> None:
        self.peers = Peers({})
        self.silent: int | None = None
        self._timeout_s = timeout_s
        self._rank = rank
        self._waits: SimpleQueue[Wait | None] | None = None
        self._thread: threading.Thread | None = None

    def start(self, calls: Sequence[Call]) -> Wait:
        """Start to make calls in the thread; `finish` waits for them."""
        if self._waits is None:
            self._waits = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._waits,), name="samestep-wait", daemon=True
            )
            self._thread.start()
        wait = Wait(calls)
        self._waits.put(wait)
        return wait

    def finish(self, wait: Waiting) -> None:
        """Wait until `wait` has ended or failed; raise a `LostWorkerError` if a worker is gone or silent.

        If another worker has announced an error, raise that one. After an interrupt, it can be called again.
        """
        patience, grace = Patience(self._timeout_s), Patience(_GRACE_S)
        while not wait.is_done(_SLICE_S):
            self.peers.look()
            error = self.peers.error(wait.worker)
            if error is None:
                grace = Patience(_GRACE_S)
            elif grace.is_over():
                self.leave_thread()
                raise error
            if patience.is_over():
                self.silent = wait.worker
                self.leave_thread()
                raise LostWorkerError(
                    f"worker {wait.worker} did not answer for {patience.timeout_s:g} s (no message arrived)"
                )

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread, and return its result; raise a `LostWorkerError` after the timeout."""
        found: list[T] = []
        wait = self.start([(None, lambda: found.append(work()))])
        self.finish(wait)
        if wait.error is not None:
            raise wait.error
        return found[0]

    def first_error(self, error: Error, worker: int | None = None) -> Error:
        """Return and announce the first error of any worker, which may have caused this worker's error.

        Args:
            error: this worker's error.
            worker: the worker that it waited for, which may have sent how its program ended.
        """
        time.sleep(_ANNOUNCED_WITHIN_S)
        self.peers.look()
        error = self.peers.error(worker) or error
        self.peers.announce(error)
        return error

    def leave_thread(self) -> None:
        """Abandon the thread, which may wait forever; later calls get a new one."""
        if self._thread is not None:
            # A thread that returns from C++ while Python shuts down aborts the process, so wait for it at
            # exit. It usually returns soon, because the exit of the worker that it waits for wakes it.
            apart_s = 0 if launched_by_samestep() else _APART_S * self._rank
            atexit.register(self._thread.join, _GRACE_S + apart_s)
            _left.append(self._thread)
        self.close()

    def close(self) -> None:
        """End the thread once it has made its calls; later calls get a new one."""
        if self._waits is not None:
            self._waits.put(None)
            self._waits = None


class Wait:
    """Calls to make in a thread.

    Attributes:
        worker: the worker that the current call waits for.
        error: the exception that a call has raised.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.worker: int | None = None
        self.error: BaseException | None = None
        self._calls = calls
        self._is_done = False
        self._running = threading.Lock()
        self._running.acquire()

    def make(self) -> None:
        """Make the calls, in the thread."""
        try:
            for worker, call in self._calls:
                self.worker = worker
                call()
        except BaseException as error:
            self.error = error.with_traceback(None)  # frames would keep this object and a group alive
        self._calls = ()  # frees what the calls refer to
        self._is_done = True
        self._running.release()

    def is_done(self, timeout_s: float) -> bool:
        """Wait until all calls have returned, or one has raised, at most this long; return whether so."""
        if not self._is_done:
            self._running.acquire(timeout=timeout_s)
        return self._is_done


def _serve(waits: SimpleQueue[Wait | None]) -> None:
    for wait in iter(waits.get, None):
        wait.make()
        del wait  # frees its tensors while this waits for the next
