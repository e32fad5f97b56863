"""Workers that start at once: a process that has imported everything forks them.

Starting Python and torch takes seconds; tests that start dozens of jobs have no time for that. The
workers are real processes, each in its own session, that run the real command line.
"""

from __future__ import annotations

import contextlib
import gc
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

from samestep.checkpoint import all_checkpoints, read_digest

STEPS = 60
SHORT = ("--towers", "5", "--batch-size", "40", "--log-every", "1", "--steps", STEPS)
"""What most jobs here train: a step takes some ten milliseconds."""


class Nursery:
    """Starts one job after the other; enter it first."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        self._workers: Workers | None = None
        threading.Thread(target=self._listen, daemon=True).start()
        self._answers.get(timeout=100)  # it has imported everything
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers()
        self._process.kill()
        self._process.communicate()

    def start(self, words: Sequence[str | Path], num_workers: int, folder: Path) -> Workers:
        """Start workers of `samestep WORDS`; worker N writes its output to folder/N.

        Those of the job before are killed if they still run.
        """
        self._end_workers()
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        folder.mkdir(parents=True, exist_ok=True)
        request = {"words": [str(word) for word in words], "folder": str(folder), "port": store.port}
        self._process.stdin.write(json.dumps({**request, "num_workers": num_workers}) + "\n")
        self._process.stdin.flush()
        self._workers = Workers(self._answers.get(timeout=100), folder, self._answers, store)
        return self._workers

    def whole_run(self, folder: Path) -> dict[int, str]:
        """Train what `SHORT` says without a break; return the digest after each step."""
        options = ("--run-dir", folder / "run", "--checkpoint-every", 1, "--keep-checkpoints", STEPS)
        assert self.start(("train", "digits", *SHORT, *options), 1, folder).wait() == [0]
        return digests_of(folder / "run")

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.signal(signal.SIGKILL)
            self._workers.wait()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(json.loads(line))


class Workers:
    """The processes of one job."""

    def __init__(self, pids: list[int], folder: Path, answers: queue.Queue[Any], store: Any) -> None:
        self.pids = pids
        self._folder = folder
        self._answers = answers
        self._statuses: dict[int, int] = {}
        self._store = store  # lives as long as the job

    def output(self, worker: int = 0) -> str:
        """Return what a worker has written so far."""
        file = self._folder / str(worker)
        return file.read_text() if file.exists() else ""

    def wait_for_step(self, step: int, timeout_s: float = 60) -> None:
        """Wait until worker 0 has told of a step."""
        deadline_s = time.monotonic() + timeout_s
        while f" step {step}," not in self.output():
            assert time.monotonic() < deadline_s, self.output()
            assert self.ended() < len(self.pids), self.output()
            time.sleep(0.002)

    def wait_until_it_waits(self, worker: int, timeout_s: float = 60) -> None:
        """Wait until a worker has done nothing but sleep for a while: it waits for another one."""
        pid, begin_s, since_s, before = self.pids[worker], time.monotonic(), time.monotonic(), ""
        while time.monotonic() - since_s < 0.05:
            assert time.monotonic() - begin_s < timeout_s, self.output(worker)
            on_cpu = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
            if on_cpu != before or state != "S":
                since_s, before = time.monotonic(), on_cpu
            time.sleep(0.005)

    def ended(self) -> int:
        """Return how many have ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._note(self._answers.get_nowait())
        return len(self._statuses)

    def signal(self, number: signal.Signals, *workers: int) -> None:
        """Signal some workers, or all; those that have ended get nothing."""
        for worker in workers or range(len(self.pids)):
            if self.pids[worker] not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[worker], number)

    def signal_group(self, number: signal.Signals, worker: int) -> None:
        """Signal a worker and the processes that it has started, as torch's launcher does."""
        os.killpg(self.pids[worker], number)

    def started_by(self, worker: int) -> list[int]:
        """Return the processes that a worker has started."""
        pid = self.pids[worker]
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self, timeout_s: float = 60) -> list[int]:
        """Wait for all to end and return their exit statuses, −n for those that signal n killed."""
        deadline_s = time.monotonic() + timeout_s
        while len(self._statuses) < len(self.pids):
            self._note(self._answers.get(timeout=max(0.0, deadline_s - time.monotonic())))
        return [self._statuses[pid] for pid in self.pids]

    def _note(self, answer: tuple[int, int]) -> None:
        pid, status = answer
        self._statuses[pid] = status


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in all_checkpoints(run_dir)]


def digests_of(run_dir: Path) -> dict[int, str]:
    """Return what is in the checkpoints of a run, by step: the digest of the weights, computed anew."""
    return dict(zip(steps_of(run_dir), map(read_digest, all_checkpoints(run_dir)), strict=True))


def main() -> None:
    """Fork the workers that requests on stdin ask for."""
    # What torch imports when the first optimizer is made, and what the first summaries need.
    import torch._dynamo
    import torch.utils.tensorboard  # noqa: F401

    import samestep.evaluation
    import samestep.recipes.cifar10
    import samestep.recipes.digits
    import samestep.training
    from samestep.cli import main as run

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.integration.hanging import HangingSettings

    samestep.recipes.RECIPES["hanging"] = HangingSettings
    gc.freeze()
    print('"ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for worker in range(request["num_workers"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                _become_worker(worker, request)
                status = run(request["words"])
                sys.stdout.flush()
                os._exit(status)  # taking the interpreter down would take longer than the whole job
        print(json.dumps(pids), flush=True)
        for _ in pids:
            pid, status = os.wait()
            print(json.dumps([pid, os.waitstatus_to_exitcode(status)]), flush=True)


def _become_worker(worker: int, request: dict[str, Any]) -> None:
    os.setsid()
    output = os.open(Path(request["folder"]) / str(worker), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(
        RANK=str(worker),
        LOCAL_RANK=str(worker),
        WORLD_SIZE=str(request["num_workers"]),
        LOCAL_WORLD_SIZE=str(request["num_workers"]),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(request["port"]),
        TORCHELASTIC_RUN_ID="nursery",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


if __name__ == "__main__":
    main()
