"""The cost of measuring the gradient noise scale: steps with the measurement against steps without.

    python benchmarks/noise.py [--rounds 30]

One worker per core, 1 thread each. A round times a block of steps with `noise_every=1` and one with 0, in
alternating order; reported are the quartiles of the rounds' ratios. By default, every 20th step measures.
"""

from __future__ import annotations

import statistics

import torch

import samestep
from step import SUBJECTS, measure_all, ours, seconds


def compare(name: str, towers_per_worker: int, rounds: int, job: samestep.Job) -> str:
    """Return one row of the table."""
    subject = SUBJECTS[name]
    num_towers = job.world_size * towers_per_worker
    torch.manual_seed(0)
    batch = subject.batch(subject.rows * num_towers)
    steps = {every: ours(*subject.trained(), num_towers, job, noise_every=every) for every in (1, 0)}
    ratios = []
    for round_number in range(rounds + 2):
        order = (1, 0) if round_number % 2 else (0, 1)
        times = {every: seconds(steps[every], batch, 3, job) for every in order}
        ratios.append(times[1] / times[0])
    low, middle, high = statistics.quantiles(ratios[2:], n=4)
    towers = f"{name:8} T={num_towers:2} W={job.world_size}"
    return f"{towers}  measured / not measured {middle:.3f} [{low:.3f}, {high:.3f}]  rounds={rounds}"


if __name__ == "__main__":
    measure_all(__doc__, compare)
