"""torch's elastic launcher: agents that are killed, that leave, and that join."""

import re
import signal
import sys
import time

import pytest
import torch.distributed as dist

from . import hanging
from .machines import Machines, has_namespaces
from .nursery import SHORT, digests_of, text_of

STEPS = 100
LONGER = (*SHORT, "--steps", STEPS)


@pytest.fixture(scope="module")
def last(nursery, tmp_path_factory):
    """The digest of the run that nothing interrupts."""
    return nursery.whole_run(
        tmp_path_factory.mktemp("last"), "hanging", "--steps", STEPS, "--checkpoint-every", STEPS
    )[STEPS]


@pytest.mark.long
def test_agents_leave_and_join_and_the_run_ends_with_the_same_bits(nursery, last, tmp_path):
    slow = tmp_path / "slow"
    slow.touch()
    words = ("train", "hanging", *LONGER, "--slow-while", slow, "--checkpoint-every", 3)
    words = (*words, "--run-dir", tmp_path / "run")
    outputs = [tmp_path / str(agent) for agent in range(4)]
    nursery.end()
    agents = nursery.start_agents(words, range(3), tmp_path)
    wait_for(" step 5,", outputs)
    first = agents.pids.index(min(agents.pids))  # torch numbers workers by it; the store is there, too
    agents.signal_groups(signal.SIGKILL, first)
    wait_for("hanging: 5 towers on 2 workers", outputs)
    later = nursery.start_agents(words, range(3, 4), tmp_path)
    wait_for("hanging: 5 towers on 3 workers", outputs, times=2)
    wait_for(" is at step ", outputs, times=2)
    came = highest(r"is at step (\d+) of", outputs)
    assert came == highest(r"stopped after step (\d+) by SIGTERM", outputs)
    wait_for(f" step {came + 3},", outputs)
    later.signal(signal.SIGTERM)
    later.wait()
    slow.unlink()
    assert agents.wait() == [-signal.SIGKILL if agent == first else 0 for agent in range(3)]
    left = highest(r"is at step (\d+) of", outputs)
    assert left == highest(r"stopped after step (\d+) by SIGTERM", outputs) > came
    assert digests_of(tmp_path / "run")[STEPS] == last


def wait_for(text, outputs, times=1, timeout_s=60):
    """Wait until some agents' workers have written something so many times; which of them may not matter."""
    deadline_s = time.monotonic() + timeout_s
    while (reported := reported_in(outputs)).count(text) < times:
        assert time.monotonic() < deadline_s, reported
        time.sleep(0.01)


def highest(pattern, outputs):
    return max(map(int, re.findall(pattern, reported_in(outputs))))


def reported_in(outputs):
    return "".join(text_of(each) for output in outputs for each in (output, output.with_suffix(".errors")))


# ---- real torchruns, and machines with a network of their own --------------------------------------


def torchrun(machines: Machines, machine: int, port: int, words: list[object]) -> list[object]:
    """Return torchrun's command line for a machine."""
    options = ["--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "machines"]
    settings = "is_host=0,last_call_timeout=3,keep_alive_interval=1,read_timeout=10"
    where = ["--rdzv-endpoint", f"{machines.host}:{port}", "--local-addr", machines.address(machine)]
    more = ["--rdzv-conf", settings, "--max-restarts", "9", hanging.__file__]
    return [sys.executable, "-m", "torch.distributed.run", *options, *where, *more, *words]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["on loopback", "on a network"])
def test_machines_running_torchrun_are_lost_and_come_back(where, last, tmp_path):
    if where == "on a network" and not has_namespaces():
        pytest.skip("network namespaces take root and iproute2")
    slow = tmp_path / "slow"
    slow.touch()
    words = ["train", "hanging", *LONGER, "--slow-while", slow, "--checkpoint-every", 3, "--timeout", 10]
    words += ["--run-dir", tmp_path / "run"]
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    outputs = [tmp_path / str(machine) for machine in range(3)]

    def start(machine: int) -> None:
        command = torchrun(machines, machine, store.port, words)
        machines.start(machine, command, outputs[machine], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    with Machines(where == "on a network") as machines:
        for machine in range(3):
            start(machine)
        wait_for(" step 5,", outputs, timeout_s=150)
        if machines.have_own_network:
            machines.cut(0)  # the others hear nothing more, not even that a connection is closed
        else:
            machines.kill(0)
        wait_for("on 2 workers", outputs, timeout_s=150)
        if machines.have_own_network:
            machines.kill(0)
            machines.plug(0)
        start(0)  # with an empty output file
        wait_for("on 3 workers", outputs, timeout_s=150)
        slow.unlink()
        assert [machines.agents[machine].wait(200) for machine in range(3)] == [0, 0, 0]
    assert digests_of(tmp_path / "run")[STEPS] == last
