"""A launcher on each of several hosts: some are cut off, are killed, or join, while the others train on."""

import os
import re
import signal
import sys
import time

import pytest
import torch.distributed as dist

from samestep.app.launching.hosts import LOST_S

from . import hanging
from .machines import Machines, has_namespaces
from .nursery import SHORT, digests_of

STEPS = 400  # enough for hosts that come back to take part, on a machine that does much else
WHERE = ["on loopback", "on a network"]
CUT_OFF = (
    "samestep: error: the job's store has not answered for 10 s: this host was cut off, and its workers were "
    "ended; run the same command again once its network works"
)


class Job:
    """A job on three machines with a worker each, which meet in a store of this process."""

    def __init__(self, machines, folder, *options):
        self.machines, self.folder, self.options = machines, folder, options
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.slow = folder / "slow"
        self.slow.touch()

    def start(self, *numbers):
        endpoint = f"{self.machines.host}:{self.store.port}"
        words = [
            "train",
            hanging.__file__,
            *SHORT,
            "--steps",
            STEPS,
            "--slow-while",
            self.slow,
            "--slow-s",
            0.3,
        ]
        words += [
            "--run-dir",
            self.folder / "run",
            "--nnodes",
            "1:3",
            "--workers",
            1,
            "--rdzv-endpoint",
            endpoint,
        ]
        for number in numbers:
            command = [sys.executable, "-m", "samestep", *words, *self.options]
            self.machines.start(number, command, self.folder / str(number))

    def text(self, *numbers):
        files = [self.folder / str(number) for number in numbers or range(3)]
        return "".join(file.read_text() for file in files if file.exists())

    def wait_for(self, text, *numbers):
        deadline_s = time.monotonic() + 100
        while text not in self.text(*numbers):
            assert time.monotonic() < deadline_s, self.text()
            assert any(agent.poll() is None for agent in self.machines.agents.values()), self.text()
            time.sleep(0.01)

    def time_of_next_steps(self, *numbers):
        """Wait until those machines tell of two more steps, and return how long that took, in seconds."""
        begin_s, before = time.monotonic(), self.text(*numbers).count(" loss = ")
        while self.text(*numbers).count(" loss = ") < before + 2:
            assert time.monotonic() - begin_s < 100, self.text()
            time.sleep(0.005)
        return time.monotonic() - begin_s

    def end(self):
        self.slow.unlink()
        return [self.machines.agents[number].wait(200) for number in range(3)]


@pytest.fixture(scope="module")
def last(nursery, tmp_path_factory):
    """The digest of the run that nothing disturbs."""
    options = ("--steps", STEPS, "--checkpoint-every", STEPS)
    return nursery.whole_run(tmp_path_factory.mktemp("last"), "hanging", *options)[STEPS]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("where", [WHERE[0], pytest.param(WHERE[1], marks=pytest.mark.slow)])
def test_hosts_are_lost_and_come_and_nobody_else_is_restarted(where, last, tmp_path):
    """Worker 0's host is cut off, or stopped as a whole, while it has the lock; the next one is killed."""
    if where == "on a network" and not has_namespaces():
        pytest.skip("network namespaces take root and iproute2")
    with Machines(where == "on a network") as machines:
        job = Job(machines, tmp_path)
        job.start(0, 1, 2)
        job.wait_for(" step 5,")
        first = next(machine for machine in range(3) if " step 5," in job.text(machine))
        others = [machine for machine in range(3) if machine != first]
        if machines.have_own_network:
            machines.cut(first)
        else:
            machines.signal(first, signal.SIGSTOP)
        print(f"\n{where}: two steps after a host was lost: {job.time_of_next_steps(*others):.2f} s")
        second = next(machine for machine in others if " loss = " in job.text(machine))
        staying = next(machine for machine in others if machine != second)
        pids = machines.pids(staying)
        if machines.have_own_network:
            assert machines.agents[first].wait(60) == 1
            assert CUT_OFF in job.text(first).splitlines()
            machines.plug(first)
        else:
            machines.signal(first, signal.SIGCONT)
            assert machines.agents[first].wait(60) == 1
            assert "the other hosts went on without this one" in job.text(first)
        machines.kill(second)
        lost_s = job.time_of_next_steps(staying)
        print(f"two steps after a host was killed: {lost_s:.2f} s")
        assert lost_s < LOST_S
        job.start(first, second)
        job.wait_for("going on with 3 workers", staying)
        assert machines.pids(staying) == pids
        assert job.end() == [0, 0, 0]
    assert digests_of(tmp_path / "run")[STEPS] == last


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_one_host_stops_all_after_a_checkpoint(number, last, tmp_path):
    with Machines(have_own_network=False) as machines:
        job = Job(machines, tmp_path)
        job.start(0, 1)
        job.wait_for("on 2 workers")
        job.wait_for(" step 5,")
        machines.agents[1].send_signal(number)
        assert [machines.agents[machine].wait(60) for machine in range(2)] == [128 + number] * 2
        [stopped] = re.findall(rf"stopped after step (\d+) by {number.name}; checkpoint written", job.text())
        assert list(digests_of(tmp_path / "run")) == [int(stopped)]
        job.slow.unlink()
        job.options = ("--rdzv-id", "another")  # the store is not new
        job.start(2)
        assert machines.agents[2].wait(100) == 0
    assert digests_of(tmp_path / "run")[STEPS] == last


@pytest.mark.long
def test_an_error_on_one_host_ends_all_and_says_where(tmp_path):
    with Machines(have_own_network=False) as machines:
        job = Job(machines, tmp_path)
        job.start(0, 1)
        job.wait_for("on 2 workers")
        job.wait_for(" step 5,")
        for pid in machines.pids(1)[1:]:
            os.kill(pid, signal.SIGUSR1)  # those that were lost are replaced
        job.wait_for("going on with 2 workers")
        job.time_of_next_steps(0, 1)
        for pid in (*machines.pids(1)[1:], *machines.pids(0)[1:]):
            os.kill(pid, signal.SIGKILL)  # but not all
        assert [machines.agents[machine].wait(60) for machine in range(2)] == [1, 1]
        said = [line for line in job.text(0, 1).splitlines() if line.endswith("the job was stopped")]
        assert sorted(line.split()[1] for line in said) == ["the", "worker"]
        assert "Traceback" not in job.text(0, 1)
