"""How workers come to be connected: every two, and those that share memory; and what is said if not."""

import os
import pickle
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from samestep.workers import meeting
from samestep.workers.meeting import meet
from samestep.workers.peers import Peers

from .jobs import Silent, until
from .simulation import values

WORKERS = range(1, 6)


def meet_all(num_workers, endpoint_of=lambda rank, endpoint: endpoint):
    """Let workers in threads meet; `endpoint_of` may change what a worker tells of itself."""
    barrier, said = threading.Barrier(num_workers), {}

    def gather(transport, value, what):
        barrier.wait()
        said[transport.rank] = pickle.dumps(value)
        barrier.wait()
        values = [pickle.loads(said[rank]) for rank in range(num_workers)]
        own = values[transport.rank]
        return [
            endpoint_of(n, v) if isinstance(v, meeting._Endpoint) and v != own else v
            for n, v in enumerate(values)
        ]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(num_workers) as threads:
        patch.setattr(meeting, "gather_objects", gather)
        everyone = [Silent(rank, num_workers) for rank in range(num_workers)]
        met = threads.map(partial(meet, shares_memory=False), everyone)
        return [Peers(connections) for connections, _ in met]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_two_are_connected(num_workers):
    everyone = meet_all(num_workers)
    for lost in range(num_workers):
        others = [peers for rank, peers in enumerate(everyone) if rank > lost]
        everyone[lost].close()
        for peers in others:
            until(lambda peers=peers, lost=lost: peers.look() or peers.error(lost))
            assert all(peers.error(rank) is None for rank in range(lost + 1, num_workers))


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
    until(lambda: first.look() or first.error(1))


@pytest.mark.parametrize("whose", ["nobody's", "somebody else's"])
def test_workers_that_cannot_be_connected_are_named_and_the_job_goes_on(whose, recwarn, monkeypatch):
    monkeypatch.setattr(meeting, "_ACCEPT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = 1 if whose == "nobody's" else other.getsockname()[1]

        def unreachable(rank, endpoint):
            lost = replace(endpoint, host="nowhere.invalid", seen_as=("127.0.0.1",), port=port)
            return lost if rank == 0 else endpoint

        everyone = meet_all(3, unreachable)
    texts = sorted(str(warning.message) for warning in recwarn)
    assert [text.partition(":")[0] for text in texts] == [
        f"worker {rank} could not connect to worker 0 on nowhere.invalid" for rank in (1, 2)
    ]
    everyone[0].close()
    everyone[2].close()
    until(lambda: everyone[1].look() or everyone[1].error(2))
    assert everyone[1].error(0) is None


def test_a_host_tells_how_it_reaches_the_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert set(meeting._own_addresses()) <= {"127.0.0.1", "::1"}
    assert list(meeting._own_addresses())
    for elsewhere in ("", "nowhere.invalid"):
        monkeypatch.setenv("MASTER_ADDR", elsewhere)
        assert not [address for address in meeting._own_addresses() if address not in ("127.0.0.1", "::1")]
    monkeypatch.delenv("MASTER_ADDR")
    list(meeting._own_addresses())


# ---- those of one host -------------------------------------------------------------------------------


def found(monkeypatch, of_worker=lambda rank: None):
    """Let two workers look for each other, each after a call of its own; return whom each reaches."""
    try_out = meeting.try_out
    places = {0: "here", 1: "here"}

    def work(job):
        monkeypatch.setattr(meeting, "try_out", try_out)
        monkeypatch.setattr(meeting, "_namespace", lambda kind: places[job.rank] + kind)
        places[job.rank] = of_worker(job.rank) or "here"
        connections, channels = meeting.meet(job.transport, shares_memory=True)
        for each in (*connections.values(), *channels.values()):
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
            monkeypatch.setattr(meeting, "try_out", refuse)

    expected = (
        r"^worker 1 shares no memory with other workers of its host \(.*Operation not permitted\): "
        r"gradients go"
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
    with pytest.warns(UserWarning, match=r"^worker 1 shares .* \(they cannot connect to each other\): "):
        assert found(monkeypatch) == [set(), set()]


def test_a_stranger_is_sent_away():
    with ExitStack() as stack:
        _, local, endpoint = meeting._listen(stack, shares_memory=True)
        ends = [meeting._connected(endpoint.name) for _ in range(3)]
        for end, token in zip(ends, [b"", b"\0" * 16, endpoint.token], strict=True):
            end.sendall(token + (3).to_bytes(4))
        connector = meeting._Connector(local, {})
        connector.accept({3}, endpoint.token)
        connections = connector.connections(set())
        assert set(connections) == {3}
        assert [end.recv(1) for end in ends[:2]] == [b"", b""]
        connections[3].sendall(b"!")
        assert ends[2].recv(1) == b"!"
        for connection in [*ends, *connections.values()]:
            connection.close()
