"""One step of samestep against DistributedDataParallel with `no_sync` accumulation, side by side.

    python benchmarks/step.py [--rounds 30]

Both train the same model on the same global batch with the same workers (one per core, 1 thread each).
DistributedDataParallel runs with its fastest settings for the model, found in a few rounds before. A round
times one block of steps of each, in alternating order; reported are the medians and the quartiles of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import samestep
from samestep.app.doctor.measure import accumulating
from samestep.recipes.digits.recipe import DigitsNet

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], object]

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "views, 1 MB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "views, 100 MB": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100},
}
"""For DistributedDataParallel; a static graph expects one backward pass per step: no accumulation."""


class Transformer(nn.Module):
    """A language model of two layers and 0.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, [rows, tokens, 256]."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


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


def pictures(*shape: int) -> Callable[[int], Batch]:
    """Return a function from the number of rows to pictures and their classes."""
    return lambda rows: (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def tokens(rows: int) -> Batch:
    """Return sequences, and the next token at each place."""
    text = torch.randint(0, 256, (rows, 65))
    return text[:, :-1], text[:, 1:]


def sgd(model: nn.Module) -> Optimizer:
    """Return momentum SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters())


@dataclass(frozen=True)
class Subject:
    """A model, its data and optimizer, and the rows of a tower."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    optimizer: Callable[[nn.Module], Optimizer]
    rows: int

    def trained(self) -> tuple[nn.Module, Optimizer]:
        """Return a new model and its optimizer."""
        model = self.build()
        return model, self.optimizer(model)


SUBJECTS = {
    "digits": Subject(DigitsNet, pictures(1, 8, 8), sgd, 32),
    "mlp-10M": Subject(mlp, pictures(784), sgd, 32),
    "transformer": Subject(Transformer, tokens, adamw, 8),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def ours(model: nn.Module, optimizer: Optimizer, num_towers: int, job: samestep.Job, **settings: Any) -> Step:
    """Return samestep's step, a function of the global batch; `settings` go to `Towers`."""
    towers = samestep.Towers(model, num_towers, job=job, **settings)

    def step(batch: Batch) -> None:
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.step()

    return step


def theirs(
    model: nn.Module, optimizer: Optimizer, num_towers: int, job: samestep.Job, **settings: Any
) -> Step:
    """Return DistributedDataParallel's step, with accumulation under `no_sync`."""
    return accumulating(DistributedDataParallel(model, **settings), optimizer, loss_of, num_towers, job)


def seconds(step: Step, batch: Batch, repeats: int, job: samestep.Job) -> float:
    """Time a block of steps."""
    job.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step(batch)
    return (time.perf_counter() - start) / repeats


def timed(
    steps: Sequence[Step], batch: Batch, rounds: int, repeats: int, job: samestep.Job
) -> list[list[float]]:
    """Return the seconds of each kind of step in each round; a round times all of them."""
    times: list[list[float]] = [[] for _ in steps]
    for round_number in range(rounds + 2):
        for which in sorted(range(len(steps)), reverse=round_number % 2 == 0):
            took = seconds(steps[which], batch, repeats, job)
            if round_number >= 2:
                times[which].append(took)
    return times


def fastest(subject: Subject, batch: Batch, num_towers: int, job: samestep.Job) -> tuple[str, Step, int]:
    """Return the fastest settings' name, DistributedDataParallel's step with them, and steps per round."""
    names = [name for name in SETTINGS if num_towers == job.world_size or "static" not in name]
    steps = [theirs(*subject.trained(), num_towers, job, **SETTINGS[name]) for name in names]
    repeats = torch.tensor(max(1, round(0.25 / seconds(steps[0], batch, 5, job))))
    torch.distributed.broadcast(repeats, 0)
    times = timed(steps, batch, 5, int(repeats), job)
    best = torch.tensor(min(range(len(steps)), key=lambda which: statistics.median(times[which])))
    torch.distributed.broadcast(best, 0)
    return names[int(best)], steps[int(best)], int(repeats)


def compare(name: str, towers_per_worker: int, rounds: int, job: samestep.Job) -> str:
    """Return one row of the table."""
    subject, num_towers = SUBJECTS[name], job.world_size * towers_per_worker
    torch.manual_seed(0)
    batch = subject.batch(subject.rows * num_towers)
    settings, peer, repeats = fastest(subject, batch, num_towers, job)
    times = timed([ours(*subject.trained(), num_towers, job), peer], batch, rounds, repeats, job)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    mine, other = (1e3 * statistics.median(column) for column in times)
    return (
        f"{name:11} T={num_towers:2} W={job.world_size} rows={len(batch[0]):4}"
        f"  samestep {mine:7.2f} ms  DDP ({settings}) {other:7.2f} ms"
        f"  ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
        f"  rounds={rounds} steps/round={repeats}"
    )


def on_all_cores() -> None:
    """Start this script again with one worker per core, unless this process is a worker."""
    if "RANK" not in os.environ:
        workers = str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.call([*command, *sys.argv], env=environment))


def measure_all(description: str, compare: Callable[[str, int, int, samestep.Job], str]) -> None:
    """Start one worker per core, or be one, and print the result of `compare` for each subject."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    on_all_cores()
    job = samestep.init("cpu")
    for name in SUBJECTS:
        for towers_per_worker in (1, 4):
            if arguments.only in f"{name}-{towers_per_worker}":
                found = compare(name, towers_per_worker, arguments.rounds, job)
                if job.is_first:
                    print(found, flush=True)
    job.close()


if __name__ == "__main__":
    measure_all(__doc__, compare)
