"""One step of samestep against DistributedDataParallel with `no_sync` accumulation, side by side.

    python benchmarks/step.py [--rounds 30]

Both train the same model on the same global batch with the same workers (one per core, 1 thread each)
and plain momentum SGD. A round times one block of steps of the one, then of the other, in turn
first and second; reported are the medians and the quartiles of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.app.doctor.measure import accumulating
from samestep.recipes.digits.recipe import DigitsNet

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """Return a perceptron of 10 million parameters."""
    return nn.Sequential(
        nn.Linear(784, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "digits": (DigitsNet, (1, 8, 8), 32),
    "mlp-10M": (mlp, (784,), 32),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def ours(model: nn.Module, num_towers: int, job: samestep.Job, **settings: int) -> Callable[[Batch], None]:
    """Return one step of samestep, a function of the global batch; `settings` go to `Towers`."""
    towers = samestep.Towers(model, num_towers, job=job, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Batch) -> None:
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.step()

    return step


def theirs(model: nn.Module, num_towers: int, job: samestep.Job) -> Callable[[Batch], None]:
    """Return one step of DistributedDataParallel, accumulating under `no_sync`."""
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return accumulating(replica, optimizer, loss_of, num_towers, job)


def seconds(step: Callable[[Batch], None], batch: Batch, repeats: int, job: samestep.Job) -> float:
    """Time a block of steps."""
    job.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step(batch)
    return (time.perf_counter() - start) / repeats


def compare(name: str, towers_per_worker: int, rounds: int, job: samestep.Job) -> str:
    """Return one row of the table."""
    build, shape, rows = MODELS[name]
    torch.manual_seed(0)
    num_towers = job.world_size * towers_per_worker
    batch = (torch.randn(rows * num_towers, *shape), torch.randint(0, 10, (rows * num_towers,)))
    steps = [ours(build(), num_towers, job), theirs(build(), num_towers, job)]
    repeats = max(1, round(0.25 / seconds(steps[1], batch, 5, job)))
    count = torch.tensor(repeats)
    torch.distributed.broadcast(count, 0)
    times: list[list[float]] = [[], []]
    for round_number in range(rounds + 2):
        for which in (0, 1) if round_number % 2 else (1, 0):
            took = seconds(steps[which], batch, int(count), job)
            if round_number >= 2:
                times[which].append(took)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    mine, other = (1e3 * statistics.median(column) for column in times)
    return (
        f"{name:8} T={num_towers:2} W={job.world_size} rows={len(batch[0]):4}"
        f"  samestep {mine:7.2f} ms  DDP {other:7.2f} ms  ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
        f"  rounds={rounds} steps/round={int(count)}"
    )


def on_all_cores() -> None:
    """Start this script again as one worker per core, unless it is one already."""
    if "RANK" not in os.environ:
        workers = str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.call([*command, *sys.argv], env=environment))


def main() -> None:
    """Start one worker per core, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    on_all_cores()
    job = samestep.init("cpu")
    for name in MODELS:
        for towers_per_worker in (1, 4):
            if arguments.only in f"{name}-{towers_per_worker}":
                row = compare(name, towers_per_worker, arguments.rounds, job)
                if job.is_first:
                    print(row, flush=True)
    job.close()


if __name__ == "__main__":
    main()
