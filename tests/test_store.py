"""Where workers find each other: who opens it, and what is said of an address without it."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.errors import ConfigError, LostWorkerError
from samestep.workers.environment import rank_environment
from samestep.workers.listeners import loopback_listener
from samestep.workers.store import open_store, reach_store


@pytest.fixture
def at(monkeypatch):
    """Make this process one of two workers that meet at a port of this host."""

    def be_worker(rank, port):
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        for name, value in rank_environment(rank, 2, "127.0.0.1", port).items():
            if name != "TORCHELASTIC_USE_AGENT_STORE":
                monkeypatch.setenv(name, value)

    return be_worker


def test_worker_0_opens_the_store_and_the_others_find_it(at):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at(1, port)
    with ThreadPoolExecutor() as threads:
        other = threads.submit(reach_store, 20)
        time.sleep(0.3)  # it comes first
        at(0, port)
        first = reach_store(20)
        first.set("key", "value")
        assert other.result().get("key") == b"value"


def test_the_launchers_store_is_reached_before_it_is_open(at, monkeypatch):
    with loopback_listener() as listener:
        at(0, listener.getsockname()[1])
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with ThreadPoolExecutor() as threads:
            early = threads.submit(reach_store, 20)
            time.sleep(0.3)
            store = open_store(listener)
            store.set("key", "value")
            assert early.result().get("key") == b"value"


def test_a_taken_port_is_not_taken_for_a_lost_worker(at):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        at(0, port)
        with pytest.raises(
            ConfigError,
            match=f"MASTER_PORT={port}: worker 0 cannot listen there .another program does.; choo",
        ):
            reach_store(5)


def test_a_host_that_cannot_be_is_named(at, monkeypatch):
    at(1, 29500)
    monkeypatch.setenv("MASTER_ADDR", "no..host\x1b[2J")
    with pytest.raises(LostWorkerError, match=r"cannot reach the job's store.*29500") as raised:
        reach_store(0.2)
    assert str(raised.value).isprintable()


def test_an_address_without_a_store_is_named(at):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at(1, port)
    with pytest.raises(LostWorkerError, match=f"cannot reach the job's store.* 127.0.0.1:{port} .*refused"):
        reach_store(1)


@pytest.mark.long
def test_a_program_that_is_no_store_is_not_waited_for_longer_than_the_timeout(at):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at(1, silent.getsockname()[1])
        with pytest.raises(
            LostWorkerError, match=r"cannot reach the job's store.*: what listens there does not answer"
        ):
            reach_store(1)
