"""How long a job pauses when one of its workers is killed: continuing without it, against restarts.

    python benchmarks/takeover.py [--tries 5] [--workers 2] [--checkpoint-every 100]

The digits recipe trains and logs each step. Some time after a checkpoint, one of the workers gets a SIGKILL,
another worker in each try. The pause lasts until training is two steps further (one may have been in flight):

- "takeover": `samestep train --workers N`; the others continue.
- "restart": the same, but all workers are killed, and the same command is started again at once.
- "torchrun": torchrun with --max-restarts, which stops all workers and starts them again.

The latter two continue from the newest checkpoint, and repeat the steps since then.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.app.loggers.json_lines import FILE, read_lines
from samestep.app.run_folder import all_checkpoints

WAYS = ("takeover", "restart", "torchrun")
LONGEST_S = 120.0


@dataclass(frozen=True)
class Job:
    """One way to run the same training in a folder."""

    way: str
    run_dir: Path
    num_workers: int
    checkpoint_every: int

    def start(self) -> subprocess.Popen[bytes]:
        """Start the job, or start it again."""
        training = [
            "-m",
            "samestep",
            "train",
            "digits",
            "--towers",
            "6",
            "--batch-size",
            "48",
            "--log-every",
            "1",
        ]
        training += ["--checkpoint-every", str(self.checkpoint_every), "--steps", "1000000"]
        training += ["--run-dir", str(self.run_dir)]
        if self.way == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
            command = [*launcher, "--nproc-per-node", str(self.num_workers), *training]
        else:
            command = [*training, "--workers", str(self.num_workers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        return subprocess.Popen([sys.executable, *command], stdout=quiet, stderr=quiet, env=environment)

    def step(self) -> int:
        """Return the last logged step."""
        lines = read_lines(self.run_dir) if (self.run_dir / FILE).exists() else []
        return max((line["step"] for line in lines if "loss/total" in line), default=0)

    def wait_for(self, step: int) -> None:
        """Wait until a step is logged."""
        deadline_s = time.monotonic() + LONGEST_S
        while self.step() < step:
            assert time.monotonic() < deadline_s, f"{self.way}: no step {step} within {LONGEST_S} s"
            time.sleep(0.01)

    def time_lost(self, victim: int) -> float:
        """Kill a worker half-way between two checkpoints; return the seconds until two steps later."""
        launcher = self.start()
        self.wait_for(self.checkpoint_every * 3 // 2)
        assert all_checkpoints(self.run_dir)
        workers = children(launcher.pid)
        step, start_s = self.step(), time.monotonic()
        for worker in workers if self.way == "restart" else [workers[victim]]:
            os.kill(worker, signal.SIGKILL)
        if self.way == "restart":
            launcher.wait()
            launcher = self.start()
        self.wait_for(step + 2)
        lost_s = time.monotonic() - start_s
        launcher.terminate()
        launcher.wait()
        return lost_s


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def line_of(way: str, lost_s: Sequence[float]) -> str:
    """Return a line of the table."""
    return f"| {way} | {len(lost_s)} | {statistics.median(lost_s):.2f} | {max(lost_s):.2f} |"


def main() -> None:
    """Try each way in turn, and print the table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--tries", type=int, default=5)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--checkpoint-every", type=int, default=100)
    chosen = options.parse_args()
    lost_s: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(chosen.tries):
            for way in WAYS:
                job = Job(way, Path(folder) / f"{way}{number}", chosen.workers, chosen.checkpoint_every)
                lost_s[way].append(job.time_lost(number % chosen.workers))
    print("| way | tries | median, s | worst, s |\n|---|---:|---:|---:|")
    for way in WAYS:
        print(line_of(way, lost_s[way]))


if __name__ == "__main__":
    main()
