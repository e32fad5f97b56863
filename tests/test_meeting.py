"""Who shares memory with whom, and what is said where two could and do not."""

import os
import socket
import warnings
from contextlib import ExitStack

import pytest

from samestep.workers import meeting

from .simulation import values


def found(monkeypatch, of_worker=lambda rank: None):
    """Let two workers look for each other, each after a call of its own; return whom each reaches."""
    allocate = meeting.allocate
    places = {0: "here", 1: "here"}

    def work(job):
        monkeypatch.setattr(meeting, "allocate", allocate)
        monkeypatch.setattr(meeting, "_namespace", lambda kind: places[job.rank] + kind)
        places[job.rank] = of_worker(job.rank) or "here"
        peers, channels = meeting.meet(job.transport, shares_memory=True)
        for each in (peers, *channels.values()):
            each.close()
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
            monkeypatch.setattr(meeting, "allocate", refuse)

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
    connected = meeting._connected

    def only_by_address(address):
        if isinstance(address, bytes):
            raise ConnectionRefusedError
        return connected(address)

    monkeypatch.setattr(meeting, "_connected", only_by_address)
    with pytest.warns(UserWarning, match=r"^worker 1 shares .* \(they do not reach each other\): "):
        assert found(monkeypatch) == [set(), set()]


def test_a_stranger_is_sent_away():
    with ExitStack() as stack:
        _, local, card = meeting._listen(stack, shares_memory=True)
        ends = [meeting._connected(card.name) for _ in range(3)]
        for end, token in zip(ends, [b"", b"\0" * 16, card.token], strict=True):
            end.sendall(token + (3).to_bytes(4))
        connections = meeting._accept(local, {3}, card.token)
        assert set(connections) == {3}
        assert [end.recv(1) for end in ends[:2]] == [b"", b""]
        connections[3].sendall(b"!")
        assert ends[2].recv(1) == b"!"
        for connection in [*ends, *connections.values()]:
            connection.close()
