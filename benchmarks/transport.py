"""The time to send all shards of the averages to every worker: `all_gather` against sends and receives.

python benchmarks/transport.py [--megabytes 40]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import samestep
from step import on_all_cores


def milliseconds(move: Callable[[], object], job: samestep.Job, rounds: int = 20) -> str:
    """Return the median and quartiles of `move`'s time."""
    times = []
    for _ in range(rounds):
        job.barrier()
        start = time.perf_counter()
        move()
        times.append(1e3 * (time.perf_counter() - start))
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:6.1f} ms [{low:.1f}, {high:.1f}]"


def main() -> None:
    """Start one worker per core, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=40)
    arguments = parser.parse_args()
    on_all_cores()
    job = samestep.init("cpu")
    others = [worker for worker in range(job.world_size) if worker != job.rank]
    whole = torch.zeros(arguments.megabytes * 250_000)
    shards = list(whole.chunk(job.world_size))

    def send() -> None:
        own = {worker: [shards[job.rank]] for worker in others}
        job.transport.post(own, {worker: [shards[worker]] for worker in others}, "benchmark").wait()

    gathered = milliseconds(lambda: dist.all_gather(shards, shards[job.rank].clone()), job)
    sent = milliseconds(send, job)
    if job.is_first:
        print(f"{arguments.megabytes} MB on {job.world_size} workers: all_gather {gathered}, sends {sent}")
    job.close()


if __name__ == "__main__":
    main()
