"""Starts jobs quickly: a process that has imported everything (`forks.py`) forks their processes.

Starting Python and torch takes seconds, which is too long for tests that start dozens of jobs. The forked
processes are real ones, each in its own session, and run the real command line or a program's file. A
`command` has the arguments that would follow `python` on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.app.run_folder import all_checkpoints, read_digest

STEPS = 60
SHORT = ("--towers", "5", "--batch-size", "40", "--log-every", "1", "--steps", STEPS)
"""Options of most jobs here; a step takes about ten milliseconds."""

SAMESTEP = ("-m", "samestep")


class Nursery:
    """Starts jobs; use it as a context manager."""

    def __enter__(self) -> Nursery:
        # One store for all jobs, like the store of an elastic agent, which all restarts share.
        self.store = new_store()
        self._forks = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        self._started: queue.Queue[list[int]] = queue.Queue()
        self._statuses: dict[int, int] = {}
        self._running: list[Processes] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self._started.get(timeout=100)  # it has imported everything
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._forks.kill()
        self._forks.communicate()

    def start(self, words: Sequence[object], num_workers: int, folder: Path) -> Processes:
        """Start the workers of a job that runs `samestep WORDS`; kill the processes of earlier jobs first.

        Process N writes its output to folder/N and its errors to folder/N.errors.
        """
        self.end()
        return self._fork("worker", (*SAMESTEP, *words), folder, range(num_workers), at(self.store))

    def start_agents(self, words: Sequence[object], agents: range, folder: Path) -> Processes:
        """Start agents of torch's elastic launcher, each with one worker, which join the running ones."""
        return self._fork("agent", (*SAMESTEP, *words), folder, agents, at(self.store))

    def start_program(self, command: Sequence[object], folder: Path, **environment: str) -> Processes:
        """Start one process as a user would; it may be a launcher."""
        return self._fork("program", command, folder, range(1), environment)

    def run(
        self, command: Sequence[object], folder: Path, num_workers: int | None = None, **environment: str
    ) -> Processes:
        """Run a program to its end: as a single process, or as all workers that a launcher would start."""
        if num_workers is None:
            processes = self.start_program(command, folder, **environment)
        else:
            store = new_store()  # not all programs can share a store with earlier ones
            processes = self._fork("worker", command, folder, range(num_workers), environment | at(store))
        processes.wait(timeout_s=400)  # longer than any test may take by default
        return processes

    def whole_run(self, folder: Path, recipe: str = "digits", *options: object) -> dict[int, str]:
        """Train with the options `SHORT`, without interruptions; return the digest after each step."""
        own = ("--run-dir", folder / "run", "--checkpoint-every", 1, "--keep-checkpoints", STEPS)
        processes = self.start(("train", recipe, *SHORT, *own, *options), 1, folder)
        assert processes.wait(timeout_s=200) == [0]
        return digests_of(folder / "run")

    def end(self) -> None:
        """Kill all processes that still run."""
        for processes in self._running:
            processes.signal_groups(signal.SIGKILL)
            processes.wait()
        self._running.clear()

    def _fork(
        self,
        role: str,
        command: Sequence[object],
        folder: Path,
        names: range,
        environment: dict[str, str],
    ) -> Processes:
        folder.mkdir(parents=True, exist_ok=True)
        outputs = [folder / str(name) for name in names]
        for output in outputs:
            output.unlink(missing_ok=True)  # of an earlier process
            output.with_suffix(".errors").unlink(missing_ok=True)
        request = {
            "role": role,
            "command": list(map(str, command)),
            "outputs": list(map(str, outputs)),
            "environment": environment,
        }
        self._forks.stdin.write(json.dumps(request) + "\n")
        self._forks.stdin.flush()
        self._running.append(Processes(self._started.get(timeout=100), outputs, self._statuses))
        return self._running[-1]

    def _listen(self) -> None:
        for line in self._forks.stdout:
            match json.loads(line):
                case {"started": pids}:
                    for pid in pids:
                        self._statuses.pop(pid, None)  # of an earlier process with that number
                    self._started.put(pids)
                case {"ended": pid, "status": status}:
                    self._statuses[pid] = status


class Processes:
    """The processes of one job, by number."""

    def __init__(self, pids: list[int], outputs: list[Path], statuses: dict[int, int]) -> None:
        self.pids = pids
        self._outputs = outputs
        self._statuses = statuses

    def output(self, number: int = 0) -> str:
        """Return the stdout and stderr of a process so far."""
        return self.stdout(number) + self.stderr(number)

    def stdout(self, number: int = 0) -> str:
        """Return the stdout of a process so far."""
        return text_of(self._outputs[number])

    def stderr(self, number: int = 0) -> str:
        """Return the stderr of a process so far."""
        return text_of(self._outputs[number].with_suffix(".errors"))

    def wait_for(self, text: str, number: int = 0, timeout_s: float = 60) -> None:
        """Wait until a process has written a text."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.output(number):
            assert time.monotonic() < deadline_s, self.output(number)
            assert self.ended() < len(self.pids), f"{self.output(number)}\nended with {self._ends()}"
            time.sleep(0.002)

    def wait_for_step(self, step: int, number: int = 0, timeout_s: float = 60) -> None:
        """Wait until a process has logged a step."""
        self.wait_for(f" step {step},", number, timeout_s)

    def wait_until_it_waits(self, number: int, timeout_s: float = 60) -> None:
        """Wait until a worker has slept for a while, because it waits for another one."""
        pid, begin_s, since_s, before = self.pids[number], time.monotonic(), time.monotonic(), ""
        while time.monotonic() - since_s < 0.05:
            assert time.monotonic() - begin_s < timeout_s, self.output(number)
            on_cpu = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
            if on_cpu != before or state != "S":
                since_s, before = time.monotonic(), on_cpu
            time.sleep(0.005)

    def ended(self) -> int:
        """Return how many processes have ended."""
        return sum(pid in self._statuses for pid in self.pids)

    def _ends(self) -> list[int | None]:
        return [self._statuses.get(pid) for pid in self.pids]

    def signal(self, which: signal.Signals, *numbers: int) -> None:
        """Send a signal to some processes, or all; skip those that have ended."""
        self._signal(os.kill, which, numbers)

    def signal_groups(self, which: signal.Signals, *numbers: int) -> None:
        """Send a signal to some processes, or all, and to the processes that they have started."""
        self._signal(os.killpg, which, numbers)

    def _signal(self, kill: Any, which: signal.Signals, numbers: Sequence[int]) -> None:
        for number in numbers or range(len(self.pids)):
            if self.pids[number] not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pids[number], which)

    def started_by(self, number: int) -> list[int]:
        """Return the ids of the processes that a process has started."""
        pid = self.pids[number]
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Wait until all processes have ended; return their exit statuses, −n if signal n killed one."""
        deadline_s = time.monotonic() + timeout_s
        while self.ended() < len(self.pids):
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.002)
        return [self._statuses[pid] for pid in self.pids]


def new_store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def at(store: dist.TCPStore) -> dict[str, str]:
    """Return the environment variables with a store's address."""
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in all_checkpoints(run_dir)]


def digests_of(run_dir: Path) -> dict[int, str]:
    """Return the digest of the weights in each checkpoint of a run, computed from the weights, by step."""
    return dict(zip(steps_of(run_dir), map(read_digest, all_checkpoints(run_dir)), strict=True))
