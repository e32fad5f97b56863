"""One launcher on each of several hosts: hosts that are cut off, killed and joining, while the others train on."""

import sys
import time

import pytest
import torch.distributed as dist

from . import hanging
from .machines import Machines, has_namespaces
from .nursery import SHORT, digests_of

STEPS = 200
WHERE = ["on loopback", "on a network"]


class Job:
    """A job on three machines with a worker each, which meet in a store of this process."""

    def __init__(self, machines, folder, *options):
        self.machines, self.folder, self.options = machines, folder, options
        self.store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.slow = folder / "slow"
        self.slow.touch()
        self.texts = {}

    def start(self, *numbers):
        endpoint = f"{self.machines.host}:{self.store.port}"
        words = ["train", hanging.__file__, *SHORT, "--steps", STEPS, "--slow-while", self.slow, "--slow-s", 0.3]
        words += ["--run-dir", self.folder / "run", "--nnodes", "1:3", "--workers", 1, "--rdzv-endpoint", endpoint]
        for number in numbers:
            command = [sys.executable, "-m", "samestep", *words, *self.options]
            self.machines.start(number, command, self.folder / str(number))

    def text(self, *numbers):
        return "".join((self.folder / str(number)).read_text() for number in numbers or range(3))

    def wait_for(self, text, *numbers):
        deadline_s = time.monotonic() + 100
        while text not in self.text(*numbers):
            assert time.monotonic() < deadline_s, self.text()
            assert any(agent.poll() is None for agent in self.machines.agents.values()), self.text()
            time.sleep(0.01)

    def time_of_next_step(self, *numbers):
        """Wait until those machines have taken two more steps, the first of which may have begun before."""
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
@pytest.mark.parametrize("where", WHERE)
def test_hosts_are_lost_and_come_and_nobody_else_is_restarted(where, last, tmp_path):
    if where == "on a network" and not has_namespaces():
        pytest.skip("network namespaces take root and iproute2")
    with Machines(where == "on a network") as machines:
        job = Job(machines, tmp_path)
        job.start(0, 1, 2)
        job.wait_for("on 3 workers")
        job.wait_for(" step 5,")
        staying = machines.pids(2)
        t0=time.monotonic()
        if machines.have_own_network:
            machines.cut(0)
        else:
            machines.signal(0, 19)
        print(f"\n{where}: first host lost, two steps later after {job.time_of_next_step(1, 2):.2f} s")
        job.wait_for("going on with 2 workers", 1, 2)
        if machines.have_own_network:
            assert machines.agents[0].wait(60) == 1
            print(job.text(0), time.monotonic()-t0)
            machines.plug(0)
        machines.kill(0)
        machines.kill(1)
        print(f"second host killed, two steps later after {job.time_of_next_step(2):.2f} s")
        job.wait_for("going on with 1 worker ", 2)
        job.start(0, 1)
        job.wait_for("going on with 3 workers", 2)
        assert machines.pids(2) == staying
        assert job.end() == [0, 0, 0]
        print("".join(f"{line}\n" for line in job.text().splitlines() if "samestep" in line))
    assert digests_of(tmp_path / "run")[STEPS] == last
