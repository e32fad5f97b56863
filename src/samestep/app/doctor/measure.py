"""A program that measures a small net: the time of a step and of DistributedDataParallel's, or peak memory.

    python -m samestep.app.doctor.measure speed|memory DEVICE WORKERS

It prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.app.launching.script import launch
from samestep.app.memory import peak_bytes
from samestep.summation.placement import Placement
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["PROGRAM", "accumulating", "main"]

PROGRAM = "samestep.app.doctor.measure"
ROWS_PER_TOWER = 32
MEMORY_TOWERS, MEMORY_ROWS = 8, 2048
_ROUNDS, _STEPS = 11, 5

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
TrainingStep = Callable[[Batch], object]


def net() -> nn.Module:
    """Return a small convolutional net, [rows, 1, 8, 8] -> [rows, 10]."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10)),
    )


def batch_of(rows: int, job: Job) -> Batch:
    """Return a random global batch, the same on all workers."""
    torch.manual_seed(0)
    return torch.randn(rows, 1, 8, 8).to(job.device), torch.randint(0, 10, (rows,)).to(job.device)


def ours(num_towers: int, job: Job) -> TrainingStep:
    """Return a training step with towers."""
    model = net().to(job.device)
    towers = Towers(model, num_towers, job=job)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Batch) -> None:
        for tower in towers(batch):
            tower.backward(_loss(model, tower.batch))
        towers.average()
        optimizer.step()

    return step


def theirs(num_towers: int, job: Job) -> TrainingStep:
    """Return a training step with DistributedDataParallel on the same slices; see `accumulating`."""
    model = DistributedDataParallel(net().to(job.device), gradient_as_bucket_view=True)
    return accumulating(model, torch.optim.AdamW(model.parameters()), _loss, num_towers, job)


def accumulating(
    model: DistributedDataParallel, optimizer: Optimizer, loss: Loss, num_towers: int, job: Job
) -> TrainingStep:
    """Return a step that accumulates gradients of tower-sized slices, all but the last under `no_sync`."""
    mine = Placement.even(num_towers, job.world_size).towers(job.rank)

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        slices = [tuple(part.tensor_split(num_towers)[tower] for part in batch) for tower in mine]
        with model.no_sync():
            for part in slices[:-1]:
                (loss(model, part) / len(mine)).backward()
        (loss(model, slices[-1]) / len(mine)).backward()
        optimizer.step()

    return step


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# ---- speed -----------------------------------------------------------------------------------------------


def compare_speed(job: Job) -> None:
    """Print the medians of both times in ms, and of their ratio, for one tower per worker and for four."""
    rows = [_compare(towers_each * job.world_size, job) for towers_each in (1, 4)]
    if job.is_first:
        print(json.dumps(rows))


def _compare(num_towers: int, job: Job) -> dict[str, float]:
    """Time blocks of both steps, and swap their order in each round, so that drift affects both alike."""
    batch = batch_of(ROWS_PER_TOWER * num_towers, job)
    steps = ours(num_towers, job), theirs(num_towers, job)
    times_ms: tuple[list[float], list[float]] = [], []
    for number in range(_ROUNDS + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            took_ms = _block_ms(steps[which], batch, job)
            if number:  # round 0 warms up
                times_ms[which].append(took_ms)
    own_ms, other_ms = map(statistics.median, times_ms)
    ratios = [own / other for own, other in zip(*times_ms, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {"towers": num_towers, "ours_ms": own_ms, "theirs_ms": other_ms}
    found |= {"low": low, "ratio": middle, "high": high}
    if job.device.type == "cuda":
        found |= {"our_syncs": _count_syncs(steps[0], batch), "their_syncs": _count_syncs(steps[1], batch)}
    return found


def _block_ms(step: TrainingStep, batch: Batch, job: Job) -> float:
    _wait_for(job.device)
    job.barrier()
    start_s = time.perf_counter()
    for _ in range(_STEPS):
        step(batch)
    _wait_for(job.device)
    return 1e3 * (time.perf_counter() - start_s) / _STEPS


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _count_syncs(step: TrainingStep, batch: Batch) -> int:
    """Return how often the host waits for the GPU in a step, as counted by torch's sync debug mode."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


# ---- memory ----------------------------------------------------------------------------------------------


def compare_memory(job: Job) -> None:
    """Print by how many bytes a step raises the peak memory, with several towers and with one."""
    found = {str(num_towers): _measure(num_towers, job) for num_towers in (MEMORY_TOWERS, 1)}
    print(json.dumps(found))


def _measure(num_towers: int, job: Job) -> int:
    step = ours(num_towers, job)
    step(batch_of(2 * num_towers, job))  # allocates what does not depend on the number of rows
    batch = batch_of(MEMORY_ROWS, job)
    before = _reset_peak(job.device)
    for _ in range(2):
        step(batch)
    return _peak(job.device) - before


def _reset_peak(device: torch.device) -> int:
    """Reset the peak memory to the current use, and return it, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    return _peak(device)


def _peak(device: torch.device) -> int:
    """Return the peak memory in bytes. On a CPU, read /proc: `getrusage` may return the parent's peak."""
    if device.type == "cuda":
        return peak_bytes(device)
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.M)[0]) * 1024


def main() -> None:
    """Run the measurement that the command line names, on that many workers."""
    which, device, workers = sys.argv[1:]
    work = {"speed": compare_speed, "memory": compare_memory}[which]
    launch(work, int(workers), device=device)


if __name__ == "__main__":
    main()
