"""One step with a sharded AdamW against DistributedDataParallel with ZeroRedundancyOptimizer, and unsharded.

    python benchmarks/sharded_optimizer.py [--rounds 30]

All train the same model on the same global batch with the same workers (one per core, 1 thread each). A round
times one block of steps of each, in another order each time; reported are the medians, the quartiles of the
rounds' ratios, and how many bytes of the optimizer's state each worker keeps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import samestep
from samestep.app.doctor.measure import accumulating
from step import MODELS, Batch, loss_of, on_all_cores, seconds

Made = tuple[Callable[[Batch], None], Optimizer]


def ours(model: nn.Module, num_towers: int, job: samestep.Job, *, sharded: bool) -> Made:
    """Return one step of samestep, a function of the global batch, and its optimizer."""
    towers = samestep.Towers(model, num_towers, job=job)
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4)
    if sharded:
        optimizer = samestep.ShardedOptimizer(towers, AdamW, lr=1e-4)

    def step(batch: Batch) -> None:
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.step()

    return step, optimizer


def theirs(model: nn.Module, num_towers: int, job: samestep.Job) -> Made:
    """Return one step of DistributedDataParallel, accumulating under `no_sync`, and its optimizer."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # Without `parameters_as_bucket_view`, which is slower here.
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), AdamW, lr=1e-4)
    return accumulating(replica, optimizer, loss_of, num_towers, job), optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Return how many bytes of state this worker keeps."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    entries = [entry for kept in local.state.values() for entry in kept.values()]
    return sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))


def compare(name: str, towers_per_worker: int, rounds: int, job: samestep.Job) -> list[str]:
    """Return the rows of one model."""
    build, shape, rows = MODELS[name]
    torch.manual_seed(0)
    num_towers = job.world_size * towers_per_worker
    batch = (torch.randn(rows * num_towers, *shape), torch.randint(0, 10, (rows * num_towers,)))
    all_made = {
        "sharded": ours(build(), num_towers, job, sharded=True),
        "unsharded": ours(build(), num_towers, job, sharded=False),
        "DDP, ZeroRedundancyOptimizer": theirs(build(), num_towers, job),
    }
    steps = [step for step, _ in all_made.values()]
    count = torch.tensor(max(1, round(0.25 / seconds(steps[0], batch, 5, job))))
    torch.distributed.broadcast(count, 0)
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 2):
        order = [(number + which) % len(steps) for which in range(len(steps))]
        for which in order if number % 2 else reversed(order):
            took = seconds(steps[which], batch, int(count), job)
            if number >= 2:
                times[which].append(took)
    found = []
    for (kind, (_, optimizer)), own in zip(all_made.items(), times, strict=True):
        kept: list[int] = [0] * job.world_size
        torch.distributed.all_gather_object(kept, state_bytes(optimizer))
        ratios = [first / each for first, each in zip(times[0], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found.append(
            f"{name:8} T={num_towers:2} W={job.world_size}  {kind:28} {1e3 * statistics.median(own):7.2f} ms"
            f"  sharded takes {middle:.3f} [{low:.3f}, {high:.3f}] of it"
            f"  state {', '.join(f'{each / 1e6:.2f}' for each in kept)} MB  rounds={rounds}"
        )
    return found


def main() -> None:
    """Start one worker per core, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    on_all_cores()
    job = samestep.init("cpu")
    for name in MODELS:
        for towers_per_worker in (1, 4):
            for row in compare(name, towers_per_worker, arguments.rounds, job):
                if job.is_first:
                    print(row, flush=True)
    job.close()


if __name__ == "__main__":
    main()
