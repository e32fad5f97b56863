"""Connections between every two workers, and what is known of those at the other end."""

import multiprocessing
import socket
import time
import warnings

import pytest

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
        assert peers.loss() is None
        assert peers.loss(other) is None


def test_an_end_without_a_word_is_told_from_one_that_was_announced():
    here, there = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    peers = Peers(dict(enumerate(here, start=1)))
    leaving = Peers({0: there[1]})
    leaving.tell("worker 4 is gone")
    leaving.close()
    there[2].close()
    until(lambda: peers.cut() == {3} and peers.loss(2) == "worker 4 is gone")
    assert peers.cut() == {3}
    peers.close()
    there[0].close()


def test_an_end_is_known_of_that_worker_alone(pair):
    ours, theirs = pair
    theirs.close()
    until(lambda: ours.look() or ours.loss(1))
    assert ours.loss(1).startswith("worker 1 is gone (")
    assert ours.loss() is None
    assert ours.loss(2) is None
    assert ours.loss(None) is None
    ours.look()


def test_a_connection_that_is_reset_is_at_its_end():
    with socket.create_server(("localhost", 0)) as listener:
        peers = Peers({1: socket.create_connection(listener.getsockname())})
        other, _ = listener.accept()
        peers.tell("worker 2 is gone")  # which the other does not read
        until(lambda: other.recv(1, socket.MSG_PEEK))
        other.close()
        peers = Peers(peers._connections)
        until(lambda: peers.look() or peers.loss(1))


def test_the_first_loss_that_is_told_names_the_worker(pair):
    ours, theirs = pair
    theirs.tell("worker 3 is gone (x)")
    theirs.tell("worker 4 is gone (y)")
    theirs.close()
    until(lambda: ours.look() or ours.loss(1))
    assert ours.loss() == ours.loss(1) == ours.loss(5) == "worker 3 is gone (x)"
    ours.tell("worker 1 is gone (z)")
    assert ours.loss() == "worker 3 is gone (x)"


def test_telling_those_who_are_gone_does_nothing(pair):
    ours, theirs = pair
    theirs.close()
    ours.tell("worker 1 is gone")
    assert ours.loss() == "worker 1 is gone"


def test_others_are_asked_while_there_is_no_connection_that_tells(pair):
    ours, _ = pair
    known = iter([None, "worker 2 is gone (the launchers say so)"])
    ours.ask = lambda: next(known)
    ours.look()
    assert ours.loss() is None
    ours.look()
    ours.look()  # and no more, once they know
    assert ours.loss() == ours.loss(1) == "worker 2 is gone (the launchers say so)"
    ours.tell("worker 1 is gone (reset)")
    assert ours.loss() == "worker 1 is gone (reset)"  # which all have heard, and name alike


def test_a_forked_process_keeps_nobody_alive(pair):
    ours, theirs = pair
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads
        child.start()
    try:
        theirs.close()
        until(lambda: ours.look() or ours.loss(1))
    finally:
        child.kill()
        child.join()
