"""Peak memory of a step: samestep's towers against DistributedDataParallel with `no_sync` accumulation.

    python benchmarks/memory.py [--towers 8]

Each runs in a process of its own, one worker, on a perceptron of 10 million parameters with small
slices, so that gradients and not activations are what counts. Printed is the peak of the resident set less
that of the process with its model and batch made, in MB and in gradients (one copy of all of them).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

import torch
import torch.distributed as dist

import samestep
from step import MODELS, Batch, ours, theirs

ROWS_PER_TOWER = 4


def peak_mb() -> float:
    """Return the largest resident set so far, in MB of 10^6 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(which: str, num_towers: int) -> float:
    """Return by how many MB steps raise the peak."""
    job = samestep.init("cpu")
    if which == "ddp":
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")
    build, shape, _ = MODELS["mlp-10M"]
    rows = ROWS_PER_TOWER * num_towers
    batch: Batch = (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))
    model = build()
    before = peak_mb()
    step = {"samestep": ours, "ddp": theirs}[which](model, num_towers, job)
    for _ in range(4):
        step(batch)
    return peak_mb() - before


def main() -> None:
    """Measure one of the two in this process, or both in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument("--which", choices=["samestep", "ddp"])
    arguments = parser.parse_args()
    if arguments.which:
        print(measure(arguments.which, arguments.towers))
        return
    gradient_mb = sum(p.numel() for p in MODELS["mlp-10M"][0]().parameters()) * 4 / 1e6
    for which in ("samestep", "ddp"):
        command = [sys.executable, __file__, "--which", which, "--towers", str(arguments.towers)]
        found = float(subprocess.check_output(command, stderr=subprocess.DEVNULL))
        print(
            f"{which:8}  T={arguments.towers} W=1  {found:6.1f} MB = {found / gradient_mb:.2f} gradients of "
            f"{gradient_mb:.1f} MB (momentum is one of them)"
        )


if __name__ == "__main__":
    main()
