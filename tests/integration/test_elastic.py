"""torch's elastic launcher: agents that are killed, that leave, and that join."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from . import hanging
from .nursery import SHORT, digests_of

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
    nursery.end()
    agents = nursery.start_agents(words, range(3), tmp_path)
    agents.wait_for_step(5)
    agents.signal_groups(signal.SIGKILL, 0)  # where worker 0 was, and the workers' store
    agents.wait_for("hanging: 5 towers on 2 workers", 1)
    later = nursery.start_agents(words, range(3, 4), tmp_path)
    agents.wait_for("hanging: 5 towers on 3 workers", 1)
    came = last_number(r"is at step (\d+) of", agents.output(1))
    assert came == last_number(r"stopped after step (\d+) by SIGTERM", agents.output(1))
    agents.wait_for_step(came + 3, 1)
    later.signal(signal.SIGTERM)
    later.wait()
    slow.unlink()
    assert agents.wait() == [-signal.SIGKILL, 0, 0]
    left = last_number(r"is at step (\d+) of", agents.output(1))
    assert left == last_number(r"stopped after step (\d+) by SIGTERM", agents.output(1)) > came
    assert digests_of(tmp_path / "run")[STEPS] == last


def last_number(pattern, text):
    return int(re.findall(pattern, text)[-1])


# ---- real torchruns, and machines with a network of their own --------------------------------------

NETWORK = "10.77.0"


class Machines:
    """Three places to run an agent: network namespaces on a bridge, or all on loopback."""

    def __init__(self, have_own_network: bool) -> None:
        self.have_own_network = have_own_network
        self.bridge = f"bridge{os.getpid()}"[:15]
        self.agents: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> "Machines":
        if self.have_own_network:
            ip(f"link add {self.bridge} type bridge")
            ip(f"addr add {NETWORK}.254/24 dev {self.bridge}")
            ip(f"link set {self.bridge} up")
            for machine in range(3):
                name, link = self.name(machine), f"{self.bridge}.{machine}"[-15:]
                ip(f"netns add {name}")
                ip(f"link add {link} type veth peer name eth0 netns {name}")
                ip(f"link set {link} master {self.bridge} up")
                ip(f"-n {name} addr add {self.address(machine)}/24 dev eth0")
                ip(f"-n {name} link set eth0 up")
                ip(f"-n {name} link set lo up")
        return self

    def __exit__(self, *_: object) -> None:
        for machine in list(self.agents):
            self.kill(machine)
        if self.have_own_network:
            for machine in range(3):
                ip(f"netns del {self.name(machine)}")
            ip(f"link del {self.bridge}")

    def name(self, machine: int) -> str:
        return f"{self.bridge}-{machine}"

    def address(self, machine: int) -> str:
        return f"{NETWORK}.{machine + 1}" if self.have_own_network else "127.0.0.1"

    def start(self, machine: int, port: int, words: list[object], output: Path) -> None:
        """Start torchrun on a machine."""
        host = f"{NETWORK}.254" if self.have_own_network else "localhost"
        inside = ["ip", "netns", "exec", self.name(machine)] if self.have_own_network else []
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", "1"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "machines", "--rdzv-endpoint", f"{host}:{port}"]
        settings = "is_host=0,last_call_timeout=3,keep_alive_interval=1,read_timeout=10"
        options = ["--rdzv-conf", settings, "--local-addr", self.address(machine), "--max-restarts", "9"]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        if self.have_own_network:
            own["GLOO_SOCKET_IFNAME"] = "eth0"
        with output.open("w") as file:
            self.agents[machine] = subprocess.Popen(
                [*inside, *torchrun, *rendezvous, *options, hanging.__file__, *map(str, words)],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **own},
            )

    def kill(self, machine: int) -> None:
        """Kill a machine's agent and all its workers."""
        agent = self.agents.pop(machine)
        pids = [agent.pid]
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            pids += [int(child) for child in children.read_text().split()] if children.exists() else []
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def cut(self, machine: int) -> None:
        """Take a machine off the network: nothing is closed, messages only stop."""
        ip(f"-n {self.name(machine)} link set eth0 down")

    def plug(self, machine: int) -> None:
        ip(f"-n {self.name(machine)} link set eth0 up")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def has_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


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

    def wait_for(text: str) -> None:
        deadline_s = time.monotonic() + 150
        while text not in (reported := "".join(output.read_text() for output in outputs)):
            assert time.monotonic() < deadline_s, reported
            time.sleep(0.01)

    with Machines(where == "on a network") as machines:
        for machine in range(3):
            machines.start(machine, store.port, words, outputs[machine])
        wait_for(" step 5,")
        if machines.have_own_network:
            machines.cut(0)  # the others hear nothing more, not even that a connection is closed
        else:
            machines.kill(0)
        wait_for("on 2 workers")
        if machines.have_own_network:
            machines.kill(0)
            machines.plug(0)
        machines.start(0, store.port, words, outputs[0])  # with an empty output file
        wait_for("on 3 workers")
        slow.unlink()
        assert [machines.agents[machine].wait(200) for machine in range(3)] == [0, 0, 0]
    assert digests_of(tmp_path / "run")[STEPS] == last
