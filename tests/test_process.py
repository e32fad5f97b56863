"""How a process ends, and with whom."""

import os
import signal
import threading
import time
import warnings

import pytest

from samestep.workers import process
from samestep.workers.environment import LIFELINE
from samestep.workers.interrupts import end_at_once_when_interrupted, interrupts_held
from samestep.workers.process import end_with_launcher


def in_a_child(work, close=None):
    """Run in a forked process and return its exit status, −n where signal n killed it.

    A file descriptor may be closed here once it has started.
    """
    with warnings.catch_warnings(action="ignore"):  # about threads, of which the child needs none
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    if close is not None:
        os.close(close)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def lifeline(monkeypatch):
    """Make this process a worker that has a lifeline; return the launcher's end."""
    reading, writing = os.pipe()
    monkeypatch.setenv(LIFELINE, str(reading))
    yield writing
    os.close(reading)


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_as_by_a_signal_when_its_launcher_does(lifeline, monkeypatch, number):
    if number is not None:
        monkeypatch.setenv(LIFELINE, f"{os.environ[LIFELINE]}:{number:d}")

    def work():
        end_with_launcher()
        assert LIFELINE not in os.environ  # what it starts has another life
        os.close(lifeline)
        time.sleep(30)

    assert in_a_child(work, close=lifeline) == -(number or signal.SIGTERM)


@pytest.mark.parametrize(("folder", "is_removed"), [("samestep-abc", True), ("mine", False)])
def test_only_the_launchers_own_folder_is_removed(lifeline, monkeypatch, tmp_path, folder, is_removed):
    left = tmp_path / folder / "0.json"
    left.parent.mkdir()
    left.touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(left))

    def work():
        end_with_launcher()
        os.close(lifeline)
        time.sleep(30)

    assert in_a_child(work, close=lifeline) == -signal.SIGTERM
    assert left.exists() != is_removed


def test_a_worker_that_does_not_end_is_killed_after_the_grace_period(lifeline, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.2)

    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_with_launcher()
        os.close(lifeline)
        time.sleep(30)

    assert in_a_child(work, close=lifeline) == -signal.SIGKILL


def test_a_worker_whose_launcher_lives_goes_on(lifeline):
    def work():
        end_with_launcher()
        end_with_launcher()
        time.sleep(0.1)

    assert in_a_child(work) == 7
    os.close(lifeline)


@pytest.mark.parametrize("value", [None, "", "abc"])
def test_without_a_lifeline_nothing_is_watched(value, monkeypatch):
    if value is None:
        monkeypatch.delenv(LIFELINE, raising=False)
    else:
        monkeypatch.setenv(LIFELINE, value)
    before = threading.active_count()
    end_with_launcher()
    assert threading.active_count() == before


def test_an_interrupt_ends_the_process_even_where_no_handler_of_pythons_can_run():
    def work():
        end_at_once_when_interrupted()
        lock = threading.Lock()
        with lock:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            lock.acquire()

    signal_before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert in_a_child(work) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal_before)


def test_an_interrupt_that_is_ignored_stays_so():
    def work():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_at_once_when_interrupted()
        signal.raise_signal(signal.SIGINT)

    assert in_a_child(work) == 7


def test_an_interrupt_that_is_held_back_comes_once_the_process_has_chosen():
    def work():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
            end_at_once_when_interrupted()
            time.sleep(1)

    assert in_a_child(work) == -signal.SIGINT
