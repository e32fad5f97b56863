"""How long a job on several hosts pauses when all processes of one host are killed.

    python benchmarks/lost_host.py [--tries 10] [--hosts 3] [--workers 1]

Hosts are launchers on this machine, each with its own workers. A loop in `samestep.Elastic` takes short
steps. All processes of the host that joined last get a SIGKILL. The pause lasts until each other worker has
begun the step again with the remaining workers. Then the host comes back, by the same command.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import samestep

LONGEST_S = 120.0
STEP_S = 0.02
STEPS_BETWEEN = 50
FOLDER = "LOST_HOST_FOLDER"  # the environment variable with the folder for the workers' files
Begun = tuple[float, int, int]  # time at the start of a step, number of the step, number of workers


def train(job: samestep.Job) -> None:
    """Take steps forever, and record the start of each."""
    notes = (Path(os.environ[FOLDER]) / str(os.getpid())).open("w", buffering=1)
    model = nn.Linear(4, 4)
    towers = samestep.Towers(model, 12, job=job)
    batch = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        notes.write(f"{time.monotonic()} {towers.step} {job.world_size}\n")
        time.sleep(STEP_S)
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()

    with samestep.Elastic(model=model, towers=towers) as elastic:
        while True:
            elastic(step)


class Job:
    """Some hosts and their workers."""

    def __init__(self, folder: Path, num_hosts: int, num_workers: int) -> None:
        self._folder = folder
        self._num_hosts, self._num_workers = num_hosts, num_workers
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self._hosts: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start a host."""
        words = [f"localhost:{self._store.port}", f"1:{self._num_hosts}", str(self._num_workers)]
        self._hosts.append(
            subprocess.Popen(
                [sys.executable, __file__, "--join", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(self._folder)},
                stderr=subprocess.DEVNULL,
            )
        )

    def begun(self, pid: int) -> list[Begun]:
        """Return what a worker has recorded."""
        file = self._folder / str(pid)
        lines = file.read_text().splitlines()[:-1] if file.exists() else []  # the last may be half written
        return [(float(time_s), int(step), int(workers)) for time_s, step, workers in map(str.split, lines)]

    def wait_for_all(self) -> None:
        """Wait until all workers have trained together for some steps."""
        pids = [pid for host in self._hosts for pid in _wait_for_children(host.pid, self._num_workers)]
        total = self._num_hosts * self._num_workers
        _wait_until(lambda: all(_have_trained(self.begun(pid), total) for pid in pids))

    def time_lost(self) -> float:
        """Kill the host that joined last; return the seconds until all others have begun their step again."""
        host = self._hosts.pop()
        victims = [host.pid, *_children(host.pid)]
        others = [pid for other in self._hosts for pid in _children(other.pid)]
        killed_s = time.monotonic()
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.wait()
        times = [self._wait_for_next(pid, killed_s, len(others)) for pid in others]
        return max(times) - killed_s

    def _wait_for_next(self, pid: int, after_s: float, num_workers: int) -> float:
        times: list[float] = []

        def is_found() -> bool:
            begun = self.begun(pid)
            times.extend(
                time_s for time_s, _, workers in begun if time_s > after_s and workers == num_workers
            )
            return bool(times)

        _wait_until(is_found)
        return times[0]

    def end(self) -> None:
        """Kill all launchers, and with them their workers."""
        for host in self._hosts:
            host.kill()
            host.wait()


def _have_trained(begun: list[Begun], num_workers: int) -> bool:
    return [workers for _, _, workers in begun[-STEPS_BETWEEN:]] == [num_workers] * STEPS_BETWEEN


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _wait_for_children(pid: int, number: int) -> list[int]:
    _wait_until(lambda: len(_children(pid)) == number)
    return _children(pid)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {LONGEST_S:g} s"
        time.sleep(0.01)


def main() -> None:
    """Lose and start hosts, and print how long that took."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--tries", type=int, default=10)
    options.add_argument("--hosts", type=int, default=3)
    options.add_argument("--workers", type=int, default=1, help="of each host")
    options.add_argument("--join", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.join is not None:
        endpoint, nnodes, workers = chosen.join
        samestep.launch(
            train, workers=int(workers), towers=12, device="cpu", nnodes=nnodes, rdzv_endpoint=endpoint
        )
        return
    lost_s = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), chosen.hosts, chosen.workers)
        try:
            for _ in range(chosen.hosts):
                job.start()
            for _ in range(chosen.tries):
                job.wait_for_all()
                lost_s.append(job.time_lost())
                job.start()
        finally:
            job.end()
    print("| hosts | workers of each | tries | median, s | least, s | most, s |")
    print("|---:|---:|---:|---:|---:|---:|")
    found = " | ".join(f"{of(lost_s):.2f}" for of in (statistics.median, min, max))
    print(f"| {chosen.hosts} | {chosen.workers} | {len(lost_s)} | {found} |")


if __name__ == "__main__":
    main()
