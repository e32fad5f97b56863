"""Waiting in a thread: interrupts, timeouts, and what is let go of."""

import gc
import math
import signal
import threading
import time
import weakref

import pytest

from samestep.errors import DisagreementError, LostWorkerError
from samestep.workers import waiter as module
from samestep.workers.waiter import Patience, Waiter

LONG_S = 30


class Clock:
    """Time as this process sees it."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)

    def pass_by(self, seconds):
        self.now_s += seconds


class Known:
    """Peers of whom something is known from the start."""

    def __init__(self, announced=None, gone=()):
        self.announced, self.gone = announced, gone
        self.sent = []

    def look(self):
        pass

    def error(self, worker=None):
        lost = LostWorkerError(f"worker {worker} is gone") if worker in self.gone else None
        return self.announced or lost

    def announce(self, error):
        self.sent.append(error)

    def close(self):
        pass


@pytest.fixture
def blocked():
    """A call that blocks until the test ends."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_calls_are_made_in_order_and_waits_end_in_order():
    made = []
    waiter = Waiter(LONG_S)
    waits = [
        waiter.start([(None, lambda n=n: made.append(n)), (1, lambda n=n: made.append(-n))]) for n in (1, 2)
    ]
    for wait in reversed(waits):
        waiter.finish(wait)
        assert wait.error is None
    assert made == [1, -1, 2, -2]
    waiter.close()


def test_an_error_keeps_the_worker_that_it_is_about():
    def fail():
        raise RuntimeError("no")

    waiter = Waiter(LONG_S)
    wait = waiter.start([(0, int), (3, fail), (4, pytest.fail)])
    waiter.finish(wait)
    waiter.finish(wait)
    assert (str(wait.error), wait.worker) == ("no", 3)
    waiter.close()


def test_an_interrupt_comes_through_and_the_wait_can_go_on():
    released = threading.Event()

    def interrupt(number, frame):
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    waiter = Waiter(LONG_S)
    wait = waiter.start([(1, released.wait)])
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start_s = time.monotonic()
        with pytest.raises(InterruptedError):
            waiter.finish(wait)
        assert time.monotonic() - start_s < 5
    finally:
        signal.signal(signal.SIGALRM, before)
    released.set()
    waiter.finish(wait)
    assert wait.error is None
    waiter.close()


def test_nothing_is_held_once_it_has_been_waited_for():
    class Message:
        def wait(self):
            pass

    message = Message()
    held = weakref.ref(message)
    waiter = Waiter(LONG_S)
    wait = waiter.start([(1, message.wait)])
    waiter.finish(wait)
    del message
    gc.collect()
    assert held() is None
    waiter.close()


def test_nothing_is_held_once_it_has_failed():
    """What holds a process group is not left to the garbage collector, perhaps that of a forked process."""

    class Message:
        def wait(self):
            raise RuntimeError("Connection closed by peer")

    message = Message()
    held = weakref.ref(message)
    waiter = Waiter(LONG_S)
    wait = waiter.start([(1, message.wait)])
    waiter.finish(wait)
    assert str(wait.error) == "Connection closed by peer"
    waiter.close()
    gc.disable()
    try:
        del message, wait
        deadline_s = time.monotonic() + 10
        while held() is not None and time.monotonic() < deadline_s:  # the thread lets go of it
            time.sleep(0.01)
        assert held() is None
    finally:
        gc.enable()


def test_the_thread_ends_with_the_waiter():
    found = []
    waiter = Waiter(LONG_S)
    waiter.finish(waiter.start([(1, lambda: found.append(threading.current_thread()))]))
    waiter.close()
    found[0].join(10)
    assert not found[0].is_alive()


# ---- workers that are gone or silent -----------------------------------------------------------------


def test_a_silent_worker_is_named_and_others_can_be_waited_for(blocked):
    waiter = Waiter(0.3)
    start_s = time.monotonic()
    with pytest.raises(LostWorkerError, match=r"^worker 2 did not answer for 0\.3 s \("):
        waiter.finish(waiter.start([(1, int), (2, blocked)]))
    assert time.monotonic() - start_s >= 0.3
    waiter.finish(waiter.start([(1, int)]))
    waiter.close()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("peers", "error"),
    [
        (Known(gone=(2,)), LostWorkerError("worker 2 is gone")),
        (Known(LostWorkerError("worker 7 is gone")), LostWorkerError("worker 7 is gone")),
        (Known(DisagreementError("worker 7 is elsewhere")), DisagreementError("worker 7 is elsewhere")),
    ],
)
def test_what_is_known_of_workers_is_raised_long_before_the_timeout(peers, error, blocked):
    waiter = Waiter(LONG_S)
    waiter.peers = peers
    with pytest.raises(type(error), match=f"^{error}$"):
        waiter.finish(waiter.start([(2, blocked)]))


@pytest.mark.parametrize("delay_s", [0, 0.3])
def test_what_it_had_sent_may_still_arrive(delay_s):
    waiter = Waiter(LONG_S)
    waiter.peers = Known(gone=(2,))
    wait = waiter.start([(2, lambda: time.sleep(delay_s))])
    waiter.finish(wait)
    assert wait.error is None
    waiter.close()


@pytest.mark.long
def test_that_another_one_is_gone_ends_no_wait(blocked):
    waiter = Waiter(1.5)
    waiter.peers = Known(gone=(1, 3))
    with pytest.raises(LostWorkerError, match="worker 2 did not answer"):
        waiter.finish(waiter.start([(2, blocked)]))


@pytest.mark.parametrize("known", [None, LostWorkerError("worker 7 is gone"), DisagreementError("no")])
def test_the_first_error_is_announced_to_all(known):
    own = LostWorkerError("worker 1 is gone")
    waiter = Waiter(LONG_S)
    waiter.peers = Known(known)
    assert waiter.first_error(own) is (known or own)
    assert waiter.peers.sent == [known or own]


# ---- time --------------------------------------------------------------------------------------------


def test_patience_counts_time(monkeypatch):
    clock = Clock(monkeypatch)
    patience = Patience(10)
    asked = [clock.pass_by(0.1) or patience.is_over() for _ in range(110)]
    assert 98 <= asked.index(True) <= 101
    assert asked == sorted(asked)


def test_time_in_which_nobody_ran_does_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    patience = Patience(10)
    for _ in range(5):
        clock.pass_by(0.1)
        assert not patience.is_over()
        clock.pass_by(1000)
        assert not patience.is_over()
    clock.pass_by(0.1)
    for _ in range(60):
        clock.pass_by(0.1)
        patience.is_over()
    assert patience.is_over()


def test_patience_may_be_endless(monkeypatch):
    clock = Clock(monkeypatch)
    patience = Patience(math.inf)
    clock.pass_by(1e9)
    assert not patience.is_over()


def test_a_process_ends_past_a_thread_that_was_left_in_a_call(blocked, monkeypatch):
    ended = []
    monkeypatch.setattr(module, "_left", [])
    monkeypatch.setattr(module.os, "_exit", ended.append)
    monkeypatch.setattr(module, "_GRACE_S", 0.01)
    module.end_with_threads(3)
    waiter = Waiter(LONG_S)
    waiter.peers = Known(gone=[1])
    with pytest.raises(LostWorkerError):
        waiter.finish(waiter.start([(1, blocked)]))
    module.end_with_threads(4)
    assert ended == [4]
