"""One step with a sharded AdamW against DistributedDataParallel with ZeroRedundancyOptimizer, and unsharded.

    python benchmarks/sharded_optimizer.py [--rounds 30]

All train the same model on the same global batch with the same workers (one per core, 1 thread each). A round
times one block of steps of each, in alternating order; reported are the medians, the quartiles of the rounds'
ratios, and the bytes of optimizer state on each worker.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import samestep
from samestep.app.doctor.measure import accumulating
from step import SUBJECTS, Step, Subject, loss_of, measure_all, seconds, timed

Made = tuple[Step, Optimizer]


def ours(subject: Subject, num_towers: int, job: samestep.Job, *, sharded: bool) -> Made:
    """Return samestep's step, a function of the global batch, and its optimizer."""
    model = subject.build()
    towers = samestep.Towers(model, num_towers, job=job)
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-4)
    if sharded:
        optimizer = samestep.ShardedOptimizer(towers, AdamW, lr=1e-4)

    return samestep.Step(towers, loss_of, optimizer), optimizer


def theirs(subject: Subject, num_towers: int, job: samestep.Job, *, has_views: bool) -> Made:
    """Return DistributedDataParallel's step, with accumulation under `no_sync`, and its optimizer."""
    replica = DistributedDataParallel(subject.build(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(), AdamW, parameters_as_bucket_view=has_views, lr=1e-4
    )
    return accumulating(replica, optimizer, loss_of, num_towers, job), optimizer


def state_bytes(optimizer: Optimizer, job: samestep.Job) -> list[int]:
    """Return the bytes of state on each worker."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    entries = [entry for kept in local.state.values() for entry in kept.values()]
    found = [0] * job.world_size
    own = sum(entry.nbytes for entry in entries if isinstance(entry, Tensor))
    torch.distributed.all_gather_object(found, own)
    return found


def compare(name: str, towers_per_worker: int, rounds: int, job: samestep.Job) -> str:
    """Return the rows of the table for one model."""
    subject, num_towers = SUBJECTS[name], job.world_size * towers_per_worker
    torch.manual_seed(0)
    batch = subject.batch(subject.rows * num_towers)
    all_made: Mapping[str, Made] = {
        "sharded": ours(subject, num_towers, job, sharded=True),
        "unsharded": ours(subject, num_towers, job, sharded=False),
        "DDP and ZeRO": theirs(subject, num_towers, job, has_views=False),
        "DDP and ZeRO, views": theirs(subject, num_towers, job, has_views=True),
    }
    steps = [step for step, _ in all_made.values()]
    repeats = torch.tensor(max(1, round(0.25 / seconds(steps[0], batch, 5, job))))
    torch.distributed.broadcast(repeats, 0)
    times = timed(steps, batch, rounds, int(repeats), job)
    found = []
    for (kind, (_, optimizer)), own in zip(all_made.items(), times, strict=True):
        ratios = [first / each for first, each in zip(times[0], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        kept = ", ".join(f"{each / 1e6:.2f}" for each in state_bytes(optimizer, job))
        found.append(
            f"{name:11} T={num_towers:2} W={job.world_size}  {kind:19} {1e3 * statistics.median(own):7.2f} ms"
            f"  sharded / this {middle:.3f} [{low:.3f}, {high:.3f}]  state {kept} MB"
            f"  rounds={rounds} steps/round={int(repeats)}"
        )
    return "\n".join(found)


if __name__ == "__main__":
    measure_all(__doc__, compare)
