"""Connections between every two workers, and what is known of those at the other end."""

import multiprocessing
import socket
import subprocess
import sys
import time
import warnings

import pytest

from samestep.errors import DisagreementError, LostWorkerError
from samestep.workers.ledger import Message
from samestep.workers.peers import Peers

from .jobs import until


@pytest.fixture
def pair():
    """The ends of worker 0 and worker 1."""
    ours, theirs = socket.socketpair()
    ends = Peers({1: ours}), Peers({0: theirs})
    yield ends
    for end in ends:
        end.close()


# ---- what is known -----------------------------------------------------------------------------------


def test_nothing_is_known_of_those_who_are_there(pair):
    for peers, other in zip(pair, (1, 0), strict=True):
        peers.look()
        assert peers.error() is None
        assert peers.error(other) is None


def test_an_end_without_a_word_is_told_from_one_that_was_announced():
    here, there = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    peers = Peers(dict(enumerate(here, start=1)))
    leaving = Peers({0: there[1]})
    leaving.announce(LostWorkerError("worker 4 is gone"))
    leaving.close()
    there[2].close()
    until(lambda: peers.cut() == {3} and str(peers.error(2)) == "worker 4 is gone")
    assert peers.cut() == {3}
    peers.close()
    there[0].close()


def test_an_end_is_known_of_that_worker_alone(pair):
    ours, theirs = pair
    theirs.close()
    until(lambda: ours.look() or ours.error(1))
    assert isinstance(ours.error(1), LostWorkerError)
    assert str(ours.error(1)).startswith("worker 1 is gone (")
    assert ours.error() is None
    assert ours.error(2) is None
    assert ours.error(None) is None
    ours.look()


def test_a_connection_that_is_reset_is_at_its_end():
    with socket.create_server(("localhost", 0)) as listener:
        peers = Peers({1: socket.create_connection(listener.getsockname())})
        other, _ = listener.accept()
        peers.announce(LostWorkerError("worker 2 is gone"))  # which the other does not read
        until(lambda: other.recv(1, socket.MSG_PEEK))
        other.close()
        peers = Peers(peers._connections)
        until(lambda: peers.look() or peers.error(1))


@pytest.mark.parametrize("kind", [LostWorkerError, DisagreementError])
def test_the_first_error_that_is_announced_is_everybodys(pair, kind):
    ours, theirs = pair
    theirs.announce(kind("worker 3 is gone (x)"))
    theirs.announce(LostWorkerError("worker 4 is gone (y)"))
    theirs.close()
    until(lambda: ours.look() or ours.error(1))
    found = [ours.error(), ours.error(1), ours.error(5)]
    assert [(type(error), str(error)) for error in found] == [(kind, "worker 3 is gone (x)")] * 3
    ours.announce(LostWorkerError("worker 1 is gone (z)"))
    assert str(ours.error()) == "worker 3 is gone (x)"


def test_announcing_to_those_who_are_gone_does_nothing(pair):
    ours, theirs = pair
    theirs.close()
    ours.announce(LostWorkerError("worker 1 is gone"))
    assert str(ours.error()) == "worker 1 is gone"


def test_what_a_worker_waits_for_is_no_error(pair):
    ours, theirs = pair
    message = Message(3, 640, "step 2, the update")
    theirs.ask_for(0, message)
    until(lambda: ours.look() or ours.asked)
    assert ours.asked == {1: message}
    assert ours.error(1) is None


def test_launchers_are_asked_until_they_know_of_a_loss():
    known = iter([None, "worker 2 is gone (reported by the launchers)"])
    ours = Peers({}, lambda: next(known))
    ours.look()
    assert ours.error() is None
    ours.look()
    ours.look()  # and no more, once they know
    assert str(ours.error()) == str(ours.error(1)) == "worker 2 is gone (reported by the launchers)"
    ours.announce(LostWorkerError("worker 1 is gone (reset)"))
    assert str(ours.error()) == "worker 1 is gone (reset)"  # which all have heard, and name alike


def test_a_forked_process_keeps_nobody_alive(pair):
    ours, theirs = pair
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads
        child.start()
    try:
        theirs.close()
        until(lambda: ours.look() or ours.error(1))
    finally:
        child.kill()
        child.join()


END = """
import socket
import subprocess
import sys
import sys

from samestep.workers.peers import Peers

peers = Peers({0: socket.socket(fileno=int(sys.argv[1]))})
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("{}['key']", "its program raised KeyError: 'key'"),
        ("raise KeyboardInterrupt", "its program raised KeyboardInterrupt"),
        ("sys.exit(3)", "its program has ended"),
        ("", "its program has ended"),
        ("import os; os.fork() or sys.exit(); os.wait()", "its program has ended"),
        ("peers.close()", "its connections are closed"),
        ("import os; os._exit(0)", "its connections are closed"),
    ],
)
def test_a_program_that_ends_says_how(program, why):
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-c", END, str(there.fileno()), program]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stderr=subprocess.DEVNULL)
    peers = Peers({1: here})
    process.wait()
    until(lambda: peers.look() or peers.error(1))
    assert str(peers.error(1)) == f"worker 1 is gone ({why})"
    assert (peers.error(), peers.cut()) == (None, {1})
