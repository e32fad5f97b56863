"""Who shares memory with whom, and what is said where two could and do not."""

import os
import socket
import warnings
from contextlib import ExitStack

import pytest

from samestep.workers import neighbours

from .simulation import values


def found(monkeypatch, of_worker=lambda rank: None):
    """Let two workers look for each other, each after a call of its own; return whom each reaches."""
    allocate = neighbours.allocate
    places = {0: "here", 1: "here"}

    def work(job):
        monkeypatch.setattr(neighbours, "allocate", allocate)
        monkeypatch.setattr(neighbours, "_namespace", lambda kind: places[job.rank] + kind)
        places[job.rank] = of_worker(job.rank) or "here"
        channels = neighbours.neighbours(job.transport)
        for channel in channels.values():
            channel.close()
        return set(channels)

    return values(work, 2)


def refuse(size):
    raise OSError(1, "Operation not permitted")


def test_workers_of_one_host_connect(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(monkeypatch) == [{1}, {0}]


def test_those_of_other_hosts_or_containers_do_not(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(monkeypatch, lambda rank: ["here", "there"][rank]) == [set(), set()]


def test_without_shared_memory_the_network_does_it_and_worker_0_says_why(monkeypatch):
    def refused(rank):
        if rank == 1:
            monkeypatch.setattr(neighbours, "allocate", refuse)

    expected = (
        r"^worker 1 shares no memory with others of its host \(.*Operation not permitted\): gradients go"
    )
    with pytest.warns(UserWarning, match=expected) as said:
        assert found(monkeypatch, refused) == [set(), set()]
    assert len(said) == 1


@pytest.mark.parametrize("missing", [[], [(socket, "SOCK_SEQPACKET")], [(socket, "AF_UNIX")]])
def test_a_system_that_has_none_is_no_fault(monkeypatch, missing):
    for owner, name in [*missing, (os, "memfd_create")]:
        monkeypatch.delattr(owner, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(monkeypatch) == [set(), set()]


def test_those_who_cannot_connect_say_so(monkeypatch):
    monkeypatch.setattr(neighbours, "_call", lambda card: None)
    with pytest.warns(UserWarning, match=r"^worker 1 shares .* \(they do not reach each other\): "):
        assert found(monkeypatch) == [set(), set()]


def test_a_stranger_is_sent_away(monkeypatch):
    callers = iter([-1, 7])
    monkeypatch.setattr(neighbours, "_process_of", lambda connection: next(callers))
    with ExitStack() as stack:
        listener, card = neighbours._listen(stack)
        ends = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for end in ends:
            end.connect(card.name)
        connections = neighbours._accept(listener, {7: 3})
        assert set(connections) == {3}
        assert ends[0].recv(1) == b""
        for connection in [*ends, *connections.values()]:
            connection.close()


def test_whose_process_has_the_other_end():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert neighbours._process_of(ends[0]) == os.getpid()
    for end in ends:
        end.close()
