"""Peak memory of a step: samestep's towers against DistributedDataParallel with `no_sync` accumulation.

    python benchmarks/memory.py [--towers 8]
    python benchmarks/memory.py --slices [--kept]

The first command runs each in its own process with one worker, on a perceptron of 10 million parameters with
small slices, so that gradients dominate, not activations. It prints how far steps raise the peak resident set
above that of the process with its model and batch, in MB and in gradients (one copy of all of them).

The second command runs a small net with slices of 16.8 MB each, 4 and 64 towers, on one worker and on two,
with batches from a loader or a global batch that is in memory already. It prints the same difference in
slices, for the worker with the largest. Freed memory is returned to the system at once, unless `--kept`: then
memory that glibc keeps but cannot reuse counts, too.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import samestep
from step import SUBJECTS, ours, theirs

ROWS_PER_TOWER = 4
SLICE_ROWS, ROW_FLOATS = 16, 1 << 18
SOURCES = ("in process", "thread", "processes", "global")


def peak_mb() -> float:
    """Return the largest resident set so far, in MB of 10^6 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(which: str, num_towers: int) -> float:
    """Return by how many MB training steps raise the peak."""
    job = samestep.init("cpu")
    if which == "ddp":
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")
    subject = SUBJECTS["mlp-10M"]
    batch = subject.batch(ROWS_PER_TOWER * num_towers)
    model, optimizer = subject.trained()
    before = peak_mb()
    step = {"samestep": ours, "ddp": theirs}[which](model, optimizer, num_towers, job)
    for _ in range(4):
        step(batch)
    return peak_mb() - before


class Rows:
    """Examples of 1 MiB, one by one."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.num_rows

    def __getitem__(self, example: int) -> Tensor:
        """Return one example, float32 [2¹⁸]."""
        return torch.full((ROW_FLOATS,), example / self.num_rows)


class RowsInOneCall(Rows):
    """The same examples; one call returns all of a tower's."""

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Tensor:
        """Return some examples, float32 [n, 2¹⁸]."""
        return torch.from_numpy(examples / self.num_rows).float()[:, None].repeat(1, ROW_FLOATS)


class Pooled(torch.nn.Linear):
    """A linear layer on means, [rows, 2¹⁸] -> [rows, 10], with small activations."""

    def __init__(self) -> None:
        super().__init__(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return ten outputs for each row."""
        return super().forward(x.unflatten(1, (1024, -1)).mean(2))


def give_back_freed_memory() -> None:
    """Undo `keep_freed_memory`: freed blocks leave the resident set at once, which then is what is in use."""
    libc = ctypes.CDLL(None)
    for option, value in ((-4, 1 << 16), (-3, 1 << 17), (-1, 1 << 17)):  # M_MMAP_MAX, _THRESHOLD, M_TRIM_...
        libc.mallopt(option, value)


def measure_slices(source: str, num_towers: int, *, is_kept: bool) -> float:
    """Return by how many slices steps raise the peak, on the worker with the largest increase."""
    job = samestep.init("cpu")
    model = Pooled()
    towers = samestep.Towers(model, num_towers, job=job)
    if not is_kept:
        give_back_freed_memory()  # after what asks glibc to keep it
    rows = SLICE_ROWS * num_towers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = samestep.Step(towers, lambda model, x: model(x).square().mean(), optimizer)
    batches: Iterable[Any]
    if source == "global":
        batches = [torch.ones(rows, ROW_FLOATS)] * 3
    else:
        dataset = {"in process": Rows, "processes": Rows, "thread": RowsInOneCall}[source](3 * rows)
        batches = samestep.TowerLoader(dataset, rows, towers, num_workers=int(source == "processes"))
    before = peak_mb()
    for batch in batches:
        step(batch)
    peak = torch.tensor(peak_mb() - before)
    if job.world_size > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    job.close()
    return float(peak) / (SLICE_ROWS * ROW_FLOATS * 4 / 1e6)


def compare_slices(kept: list[str]) -> None:
    """Print a row for each source of batches and number of workers."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    for source in SOURCES:
        for num_workers in (1, 2):
            found = []
            for num_towers in (4, 64):
                options = [__file__, "--which", source, "--towers", str(num_towers), *kept]
                output = subprocess.check_output(
                    [*launcher, str(num_workers), *options], stderr=subprocess.DEVNULL
                )
                found.append(float(output.split()[0]))
            print(
                f"{source:10} W={num_workers}  T=4 {found[0]:5.2f} slices, T=64 {found[1]:5.2f} slices",
                flush=True,
            )


def main() -> None:
    """Measure one in this process, or all, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument("--slices", action="store_true")
    parser.add_argument("--kept", action="store_true", help="keep freed memory, as in training")
    parser.add_argument("--which", choices=["samestep", "ddp", *SOURCES])
    arguments = parser.parse_args()
    if arguments.which in SOURCES:
        found = measure_slices(arguments.which, arguments.towers, is_kept=arguments.kept)
        if os.environ.get("RANK", "0") == "0":
            print(found)
    elif arguments.which:
        print(measure(arguments.which, arguments.towers))
    elif arguments.slices:
        compare_slices(["--kept"] * arguments.kept)
    else:
        compare(arguments.towers)


def compare(num_towers: int) -> None:
    """Print a row for samestep and one for DistributedDataParallel."""
    gradient_mb = sum(p.numel() for p in SUBJECTS["mlp-10M"].build().parameters()) * 4 / 1e6
    for which in ("samestep", "ddp"):
        command = [sys.executable, __file__, "--which", which, "--towers", str(num_towers)]
        found = float(subprocess.check_output(command, stderr=subprocess.DEVNULL))
        print(
            f"{which:8}  T={num_towers} W=1  {found:6.1f} MB = {found / gradient_mb:.2f} gradients of "
            f"{gradient_mb:.1f} MB (momentum is one of them)"
        )


if __name__ == "__main__":
    main()
