"""The cost of checkpoints: steps while one is written in the background, against steps without.

    python benchmarks/checkpoint.py [--megabytes 100] [--every 1000] [--rounds 20] [--folder DIR]

A perceptron trains with momentum SGD, one worker per core; weights and momentum together have the given size.
A round times two blocks of the same number of steps, in alternating order. One block takes a snapshot before
its first step, writes it during the steps, and ends when it is on disk. Reported are medians and quartiles
over the rounds: a step without a checkpoint; the time that a checkpoint adds to its block; how much of that
is the snapshot, during which training pauses; and the share of the time for a checkpoint every so many steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.app.lock import RunLock
from samestep.app.run_folder import all_checkpoints
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import take_snapshot
from step import on_all_cores

ROWS_PER_TOWER = 32


def perceptron(width: int) -> nn.Module:
    """Return two square layers."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def training(megabytes: int, job: samestep.Job) -> tuple[TrainingObjects, Callable[[], object]]:
    """Return the objects of a training run, and a step of it."""
    torch.manual_seed(0)
    width = math.isqrt(megabytes * 10**6 // 16)  # of two layers and as much momentum, 4 bytes each
    model = perceptron(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    towers = samestep.Towers(model, job.world_size, job=job)
    step = samestep.Step(towers, lambda model, x: F.mse_loss(model(x), x), optimizer)
    batch = torch.randn(ROWS_PER_TOWER * job.world_size, width)
    objects = TrainingObjects(model=model, towers=towers, state={"optimizer": optimizer})
    return objects, partial(step, batch)


def block(
    step: Callable[[], object], num_steps: int, writer: CheckpointWriter, objects: TrainingObjects | None
) -> tuple[float, float]:
    """Take steps; return the total seconds, and the seconds of the snapshot (0 without one)."""
    start_s = snapshot_s = time.perf_counter()
    if objects is not None and objects.towers is not None:
        writer.write(objects.towers.step, partial(take_snapshot, objects))
        snapshot_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    writer.wait()
    return time.perf_counter() - start_s, snapshot_s - start_s


def in_ms(values: Sequence[float]) -> str:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles([1e3 * value for value in values], n=4)
    return f"{middle:.1f} ms [{low:.1f}, {high:.1f}]"


def measure(arguments: argparse.Namespace, run_dir: Path, job: samestep.Job) -> str:
    """Return the report."""
    objects, step = training(arguments.megabytes, job)
    without_s: list[float] = []
    with_s: list[float] = []
    snapshots_s: list[float] = []
    with RunLock(run_dir, job) as lock, CheckpointWriter(lock, keep_last=1) as writer:
        block(step, 5, writer, objects)
        num_steps = steps_for_a_checkpoint(step, writer, objects, job)
        for round_number in range(arguments.rounds):
            for is_written in (False, True) if round_number % 2 else (True, False):
                job.barrier()
                took_s, snapshot_s = block(step, num_steps, writer, objects if is_written else None)
                (with_s if is_written else without_s).append(took_s)
                snapshots_s += [snapshot_s] if is_written else []
    steps_s = [took_s / num_steps for took_s in without_s]
    added_s = [a - b for a, b in zip(with_s, without_s, strict=True)]
    low, middle, high = statistics.quantiles(
        [added / (arguments.every * step_s) for added, step_s in zip(added_s, steps_s, strict=True)], n=4
    )
    size = sum(file.stat().st_size for path in all_checkpoints(run_dir) for file in path.iterdir())
    return (
        f"{size / 1e6:.0f} MB on {job.world_size} workers, {num_steps} steps a block, "
        f"{arguments.rounds} rounds\nstep {in_ms(steps_s)}; a checkpoint adds {in_ms(added_s)}, "
        f"of which the snapshot {in_ms(snapshots_s)}"
        f"\nevery {arguments.every} steps: {middle:+.2%} [{low:+.2%}, {high:+.2%}]"
    )


def steps_for_a_checkpoint(
    step: Callable[[], object], writer: CheckpointWriter, objects: TrainingObjects | None, job: samestep.Job
) -> int:
    """Return a number of steps that surely outlasts writing a checkpoint, the same on all workers."""
    job.barrier()
    step_s = block(step, 5, writer, None)[0] / 5
    alone_s = block(step, 0, writer, objects)[0]
    count = torch.tensor(max(10, math.ceil(3 * alone_s / step_s)))
    if job.world_size > 1:
        torch.distributed.broadcast(count, 0)
    return int(count)


def main() -> None:
    """Start one worker per core, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100, help="of weights and momentum")
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written, on the disk in question")
    arguments = parser.parse_args()
    on_all_cores()
    job = samestep.init("cpu")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = measure(arguments, Path(folder), job)
    if job.is_first:
        print(report, flush=True)
    job.close()


if __name__ == "__main__":
    main()
