"""Connections between every two workers, and what is known of those at the other end."""

import multiprocessing
import pickle
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from samestep.workers import meeting
from samestep.workers.meeting import meet
from samestep.workers.peers import Peers

from .jobs import Silent

WORKERS = range(1, 6)


def until(condition, timeout_s=10):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


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


# ---- how they meet -----------------------------------------------------------------------------------


def meet_all(num_workers, card_of=lambda rank, card: card):
    """Let workers in threads meet; `card_of` may change what a worker tells of itself."""
    barrier, said = threading.Barrier(num_workers), {}

    def gather(transport, value, what):
        barrier.wait()
        said[transport.rank] = pickle.dumps(value)
        barrier.wait()
        values = [pickle.loads(said[rank]) for rank in range(num_workers)]
        own = values[transport.rank]
        return [
            card_of(n, v) if isinstance(v, meeting._Card) and v != own else v for n, v in enumerate(values)
        ]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(num_workers) as threads:
        patch.setattr(meeting, "gather_objects", gather)
        everyone = [Silent(rank, num_workers) for rank in range(num_workers)]
        return [peers for peers, _ in threads.map(partial(meet, shares_memory=False), everyone)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_two_are_connected(num_workers):
    everyone = meet_all(num_workers)
    for lost in range(num_workers):
        others = [peers for rank, peers in enumerate(everyone) if rank > lost]
        everyone[lost].close()
        for peers in others:
            until(lambda peers=peers, lost=lost: peers.look() or peers.loss(lost))
            assert all(peers.loss(rank) is None for rank in range(lost + 1, num_workers))


def test_strangers_are_let_go(monkeypatch):
    listeners = []
    listen = meeting.open_listener

    def listener():
        made = listen()
        listeners.append(made)
        port = made.getsockname()[1]
        for said in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 16 + (1).to_bytes(4)):
            stranger = socket.create_connection(("localhost", port))
            stranger.sendall(said)
            stranger.close()
        return made

    monkeypatch.setattr(meeting, "open_listener", listener)
    first, second = meet_all(2)
    assert all(each.fileno() == -1 for each in listeners)
    second.close()
    until(lambda: first.look() or first.loss(1))


def test_workers_that_cannot_be_connected_are_named_and_the_job_goes_on(recwarn):
    def unreachable(rank, card):
        return replace(card, host="nowhere.invalid", seen_as=("127.0.0.1",), port=1) if rank == 0 else card

    everyone = meet_all(3, unreachable)
    texts = sorted(str(warning.message) for warning in recwarn)
    assert [text.partition(":")[0] for text in texts] == [
        f"worker {rank} found no way to nowhere.invalid, where worker 0 is" for rank in (1, 2)
    ]
    everyone[0].close()
    everyone[2].close()
    until(lambda: everyone[1].look() or everyone[1].loss(2))
    assert everyone[1].loss(0) is None


def test_a_host_tells_how_it_reaches_the_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert set(meeting._own_addresses()) <= {"127.0.0.1", "::1"}
    assert list(meeting._own_addresses())
    for elsewhere in ("", "nowhere.invalid"):
        monkeypatch.setenv("MASTER_ADDR", elsewhere)
        assert not [address for address in meeting._own_addresses() if address not in ("127.0.0.1", "::1")]
    monkeypatch.delenv("MASTER_ADDR")
    list(meeting._own_addresses())


def test_hosts_without_ipv6_listen_too(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with meeting.open_listener() as listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()
