"""Three machines to run programs on, with a network of their own or all on loopback."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

NETWORK = "10.77.0"


class Machines:
    """Three places to run programs: network namespaces on a bridge, or all on loopback."""

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

    def start(self, machine: int, command: list[object], output: Path, **environment: str) -> None:
        """Start a program on a machine."""
        inside = ["ip", "netns", "exec", self.name(machine)] if self.have_own_network else []
        own = {"GLOO_SOCKET_IFNAME": "eth0"} if self.have_own_network else {}
        with output.open("w") as file:
            self.agents[machine] = subprocess.Popen(
                [*inside, *map(str, command)],
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **own, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def host(self) -> str:
        """Where a store of this process is reached."""
        return f"{NETWORK}.254" if self.have_own_network else "localhost"

    def pids(self, machine: int) -> list[int]:
        """Return the processes of a machine, the one that was started first."""
        pids = [self.agents[machine].pid]
        for pid in pids:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            pids += [int(child) for child in children.read_text().split()] if children.exists() else []
        return pids

    def signal(self, machine: int, number: signal.Signals) -> None:
        """Signal all processes of a machine."""
        for pid in self.pids(machine):
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, number)

    def kill(self, machine: int) -> None:
        """Kill a machine's program and all that it has started."""
        self.signal(machine, signal.SIGKILL)
        self.agents.pop(machine).wait()

    def cut(self, machine: int) -> None:
        """Take a machine off the network: nothing is closed, messages only stop."""
        ip(f"-n {self.name(machine)} link set eth0 down")

    def plug(self, machine: int) -> None:
        ip(f"-n {self.name(machine)} link set eth0 up")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def has_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None
