"""How launchers of several hosts meet: torch's rendezvous, all in this process."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from samestep.app.launching import host_rendezvous, hosts as hosts_module
from samestep.app.launching.host_rendezvous import Rendezvous
from samestep.app.launching.hosts import Hosts
from samestep.app.launching.nodes import Nodes
from samestep.errors import ConfigError, LostWorkerError
from samestep.workers.environment import PER_HOST


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(host_rendezvous, "_LOOK_S", 0.05)
    monkeypatch.setattr(host_rendezvous, "_LAST_CALL_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return replace(Nodes.of("2:3", f"127.0.0.1:{port}"), timeout_s=60)


@pytest.mark.long
def test_hosts_meet_and_nobody_comes_once_the_job_is_over(nodes):
    both = replace(nodes, most=2, most_workers=2)
    with ThreadPoolExecutor(2) as threads:
        met = list(threads.map(lambda number: Rendezvous(both, number), (1, 2)))
    first, second = sorted((each.place for each in met), key=lambda place: place.first_rank)
    sizes = (1, 2) if second.first_rank == 1 else (2, 1)
    pairs = zip((first, second), sizes, strict=True)
    expected = [place.host * PER_HOST + rank for place, size in pairs for rank in range(size)]
    assert first.members == second.members == expected[:2]
    assert {first.host, second.host} == {0, 1}
    assert (first.world_size, first.job) == (second.world_size, second.job) == (2, second.job)
    last = second.environment(sizes[1] - 1, sizes[1])  # for which there is no work
    assert (last["RANK"], last["WORLD_SIZE"]) == (str(sizes[1] - 1), str(sizes[1]))
    assert first.environment(0, sizes[0])["WORLD_SIZE"] == "2"
    assert sorted(each.has_store for each in met) == [False, True]
    for each in met:
        each.close()
    with pytest.raises(
        LostWorkerError, match=r"^the job samestep at 127\.0\.0\.1:\d+ is over: to continue its"
    ):
        Rendezvous(both, 1)


@pytest.mark.long
def test_a_host_joins_a_job_that_was_started_like_itself(nodes):
    begun = replace(nodes, fewest=1, must_match={"--steps": "7"})
    trains = Rendezvous(begun, 2)
    joins = Rendezvous(begun, 3)
    assert (trains.place.members, joins.place.members) == ([0, 1], None)
    assert (joins.place.job, joins.place.host) == (trains.place.job, 1)
    assert joins.place.environment(2, 3)["LOCAL_RANK"] == "2"
    with pytest.raises(
        ConfigError, match="has --steps = 7, this host has 8: start all hosts with the same command"
    ):
        Rendezvous(replace(begun, must_match={"--steps": "8"}), 4)
    for each in (joins, trains):
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("is_there", [True, False])
def test_hosts_that_meet_without_those_who_train_join_them(is_there, nodes, monkeypatch):
    """Who trains was silent for longer than torch waits, but its launcher counts on."""
    monkeypatch.setattr(hosts_module, "LOST_S", 1.0)

    def start(number, keep_alive_s):
        parameters = partial(RendezvousParameters, keep_alive_interval=keep_alive_s)
        monkeypatch.setattr(host_rendezvous, "RendezvousParameters", parameters)
        return Rendezvous(replace(nodes, fewest=1), number)

    trains = start(2, 1000)
    trains.leave()
    job = trains.place.job
    hosts, is_over = Hosts(PrefixStore(job, trains.open()), 0), threading.Event()

    def count():
        while is_there and not is_over.wait(0.1):
            hosts.look()

    with ThreadPoolExecutor(1) as thread:
        counting = thread.submit(count)
        comes = start(3, 1)
        is_over.set()
        counting.result()
    first = [PER_HOST + rank for rank in range(3)]
    assert (comes.place.job == job, comes.place.members) == (is_there, None if is_there else first)
    for each in (comes, trains):
        each.close()


@pytest.mark.long
def test_too_few_hosts(nodes, capsys):
    with pytest.raises(LostWorkerError, match=r"did not get 2 hosts within 1 s$"):
        Rendezvous(replace(nodes, timeout_s=1), 1)
    here, there = socket.gethostname(), f"127.0.0.1:{nodes.port}"
    expected = f"samestep: {here} waits at {there} for 2 to 3 hosts of the job samestep\n"
    assert capsys.readouterr().err == expected


def test_no_store(nodes):
    with pytest.raises(LostWorkerError, match=r"workers meet, at 192\.0\.2\.1:\d+ \(from --rdzv-endpoint\)"):
        Rendezvous(replace(nodes, host="192.0.2.1", timeout_s=0.2), 1)  # an address that nobody has
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
