"""Towers that follow the workers' speed (`placement="auto"`) against even cuts, side by side.

    python benchmarks/pace.py [--rounds 20] [--only throttled]

Two workers, each pinned to a core, train 12 towers. "throttled": a busy process takes half of worker 1's
core; even cuts then run 6 towers at half speed, and 8 + 4 towers can be 1.5 times as fast. "equal": nothing
else runs. "random": each second, busy processes start or end on one core or both, from a fixed seed. A round
times a block of steps of each, in alternating order; reported are the median and the quartiles of the rounds'
ratios, the cuts, and whether all weights are the same bits.

Needs two idle cores: the system moves other load to the core without a busy process, which makes the workers
equally fast again.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

import samestep
from samestep.recipes.digits.recipe import DigitsNet

NUM_TOWERS, ROWS = 12, 200
WARM_UP_S = 14.0
Batch = tuple[Tensor, Tensor]


class Training:
    """One model in training, and the history of its cuts."""

    def __init__(self, job: samestep.Job, placement: str) -> None:
        torch.manual_seed(0)
        self.model = DigitsNet()
        self.towers = samestep.Towers(self.model, NUM_TOWERS, job=job, placement=placement)  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.cuts = [self.towers.placement.cuts]

    def step(self, batch: Batch) -> None:
        """Take a step."""
        for tower in self.towers(batch):
            tower.backward(F.cross_entropy(self.model(tower.batch[0]), tower.batch[1]))
        self.towers.average()
        self.optimizer.step()
        if self.cuts[-1] != self.towers.placement.cuts:
            self.cuts.append(self.towers.placement.cuts)


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Keep a core busy with another process."""
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def throttled() -> Iterator[None]:
    """Take half of worker 1's core."""
    with busy(core_of(1)):
        yield


@contextmanager
def equal() -> Iterator[None]:
    """Leave all cores alone."""
    yield


@contextmanager
def changing() -> Iterator[None]:
    """Take half of one core, of both or of none; choose again each second."""
    chance, over = random.Random(0), threading.Event()

    def change() -> None:
        while not over.is_set():
            with ExitStack() as stack:
                for core in (0, 1):
                    if chance.random() < 0.5:
                        stack.enter_context(busy(core_of(core)))
                over.wait(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


CASES = {"throttled": throttled, "equal": equal, "random": changing}


def core_of(worker: int) -> int:
    """Return the core that a worker is pinned to."""
    return sorted(CORES)[worker]


CORES = os.sched_getaffinity(0)


def seconds(step: Callable[[Batch], None], batch: Batch, repeats: int, job: samestep.Job) -> float:
    """Time a block of steps."""
    job.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step(batch)
    job.barrier()
    return (time.perf_counter() - start) / repeats


def compare(case: str, rounds: int, job: samestep.Job) -> str:
    """Return the lines of one case."""
    rows = ROWS * NUM_TOWERS
    batch = (torch.randn(rows, 1, 8, 8), torch.randint(0, 10, (rows,)))
    torch.distributed.broadcast(batch[0], 0)
    torch.distributed.broadcast(batch[1], 0)
    even, auto = Training(job, "even"), Training(job, "auto")
    with CASES[case]() if job.is_first else equal():
        repeats = torch.tensor(max(2, round(0.5 / seconds(even.step, batch, 5, job))))
        torch.distributed.broadcast(repeats, 0)
        warm_up = round(WARM_UP_S / 0.5)
        ratios, times = [], []
        for round_number in range(warm_up + rounds):
            order = (even, auto) if round_number % 2 else (auto, even)
            took = {each: seconds(each.step, batch, int(repeats), job) for each in order}
            if round_number >= warm_up:
                ratios.append(took[even] / took[auto])
                times.append((took[even], took[auto]))
    for _ in range(5):  # as many as `even` took to find `repeats`
        auto.step(batch)
    digests = {samestep.digest(even.model), samestep.digest(auto.model)}
    low, middle, high = statistics.quantiles(ratios, n=4)
    mean = sum(first for first, _ in times) / sum(second for _, second in times)
    slow, fast = (rows / statistics.median(column) for column in zip(*times, strict=True))
    cuts = " ".join("+".join(str(b - a) for a, b in pairwise(c)) for c in auto.cuts[:12])
    return (
        f"{case:9} even {slow:6.0f} rows/s  auto {fast:6.0f} rows/s  ratio {middle:.3f} [{low:.3f}, "
        f"{high:.3f}]  in all {mean:.3f}  {'same' if len(digests) == 1 else 'OTHER'} bits  "
        f"{len(auto.cuts) - 1} changes: {cuts}  ({rounds} rounds of {int(repeats)} steps)"
    )


def main() -> None:
    """Start two workers, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*command, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}))
    os.sched_setaffinity(0, {core_of(int(os.environ["RANK"]))})
    job = samestep.init("cpu")
    for case in CASES:
        if arguments.only in case:
            row = compare(case, arguments.rounds, job)
            if job.is_first:
                print(row, flush=True)
    job.close()


if __name__ == "__main__":
    main()
