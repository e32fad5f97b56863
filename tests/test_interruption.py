import os
import signal
import warnings
from types import SimpleNamespace

import pytest

import samestep
from samestep.app import interruption as module
from samestep.app.interruption import ECHO_S, Interruption, StopFlags, handling

from .jobs import job_of

ALONE = samestep.Job(samestep.init("cpu").device)
SECOND = job_of(1, 2)
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers(default_signals):
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    """Time as the test sets it, in seconds."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def in_a_child(work):
    """Run in a forked process and return its exit status, −n where signal n killed it."""
    with warnings.catch_warnings(action="ignore"):  # about threads, of which the child needs none
        pid = os.fork()
    if pid == 0:
        work()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_sets_a_flag(number):
    with Interruption(SECOND) as interruption:
        assert interruption.flags() == StopFlags(0)
        signal.raise_signal(number)
        flags = interruption.flags()
    assert flags == StopFlags[number.name]
    assert (flags.reason, flags.exit_status) == (number.name, 128 + number)


def test_without_a_signal_the_handlers_are_put_back(handlers):
    with Interruption(ALONE):
        assert {number: signal.getsignal(number) for number in HANDLED} != handlers
    assert {number: signal.getsignal(number) for number in HANDLED} == handlers


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_parent_ignores_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Interruption(ALONE):
        assert signal.getsignal(number) is signal.SIG_IGN
    with handling([number], lambda *_: None):
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_an_echo_of_the_first_signal_changes_nothing(clock):
    with Interruption(ALONE) as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interruption.flags() == StopFlags.SIGTERM


def test_what_another_worker_was_sent_counts_as_the_first_signal(clock, handlers):
    with Interruption(SECOND) as interruption:
        interruption.acknowledge(StopFlags.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # as the launcher does, when the first worker has ended
    assert {number: signal.getsignal(number) for number in HANDLED} != handlers


@pytest.mark.parametrize("number", HANDLED)
def test_a_second_signal_kills_even_after_the_loop(clock, number):
    def work():
        with Interruption(ALONE):
            signal.raise_signal(signal.SIGINT)
        clock.s = ECHO_S + 0.1
        signal.raise_signal(number)

    assert in_a_child(work) == -number


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 7)])
def test_a_process_forked_by_a_worker_ends_by_sigterm_and_leaves_sigint_to_the_worker(number, status):
    with Interruption(ALONE) as interruption:
        assert in_a_child(lambda: signal.raise_signal(number)) == status
        assert interruption.flags() == StopFlags(0)


def test_time_is_up_on_the_first_worker_alone(clock):
    with Interruption(ALONE, max_seconds=60) as interruption, Interruption(SECOND, max_seconds=0) as second:
        assert interruption.flags() == StopFlags(0)
        clock.s = 60.0
        assert interruption.flags() == StopFlags.TIME_UP
        assert second.flags() == StopFlags(0)
    assert (StopFlags.TIME_UP.reason, StopFlags.TIME_UP.exit_status) == ("--max-seconds", 0)


def test_a_checkpoint_is_wished_for_once_a_period(clock):
    with Interruption(ALONE, checkpoint_minutes=2) as interruption:
        assert interruption.flags() == StopFlags(0)
        clock.s = 120.0
        assert interruption.flags() == StopFlags.CHECKPOINT
        assert interruption.flags() == StopFlags(0)
    assert StopFlags.CHECKPOINT.reason is None


def test_a_signal_comes_before_a_time_limit():
    flags = StopFlags.TIME_UP | StopFlags.SIGINT | StopFlags.CHECKPOINT
    assert (flags.reason, flags.exit_status) == ("SIGINT", 130)
