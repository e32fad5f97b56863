"""`Towers` with a small model, for the same schedules as `tests/protocol.py` without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import Job, Placement, Towers, UsageError

from .program import Script
from .protocol import RATE, ROWS

if TYPE_CHECKING:
    from .schedules import Schedule, Task


class Net(nn.Module):
    """A layer for each of the schedule's parameters, a norm with running statistics, and dropout."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        torch.manual_seed(schedule.seed)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.layers = nn.ParameterList(torch.randn(4, size) for size in schedule.sizes)

    def forward(self, x: Tensor, meet: Callable[[int], None]) -> Tensor:
        hidden = F.dropout(self.norm(x), 0.2)
        total = hidden.sum(1)
        for index, layer in enumerate(self.layers):
            used = hidden @ layer
            if used.requires_grad:
                used.register_hook(lambda gradient, n=index: meet(n))
            total = total + used.tanh().sum(1)
        return total


class Trap(Mapping[str, Tensor]):
    """A batch that may fail while it is cut."""

    def __init__(self, x: Tensor, meet: Callable[[], None]) -> None:
        self.x, self.meet = x, meet

    def __getitem__(self, key: str) -> Tensor:
        self.meet()
        return {"x": self.x}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class ModelTowers:
    """`Towers`, and a step of each kind."""

    def __init__(self, job: Job, schedule: Schedule, script: Script, flags: Callable[[], int]) -> None:
        self.schedule, self.script, self.flags = schedule, script, flags
        self.model = Net(schedule)
        self.towers = Towers(
            self.model,
            schedule.num_towers,
            job=job,
            bucket_bytes=schedule.bucket_bytes,
            noise_every=2,
            statistics="pooled" if schedule.seed % 2 else "mean",
            seed=schedule.seed,
        )
        self.abandon = self.towers.abandon

    @property
    def step(self) -> int:
        return self.towers.step

    @property
    def weights(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]

    def take(self, task: Task) -> int:
        """Take a step; return the flags of all workers."""
        self.abandon()
        self.towers.placement = task.placement
        for index, layer in enumerate(self.model.layers):
            layer.requires_grad_(index in task.trained)
        rate = RATE + self.script.is_apart("rate")
        options = {"flags": self.flags, "must_match": {"rate": rate}}
        if task.kind == "whole" and not self.script.is_apart("plan"):
            self.whole(options)
        else:
            self.passes(task, options)
        self.script.meet("after")
        report = self.towers.average()
        with torch.no_grad():
            for layer in self.model.layers:
                if layer.grad is not None:
                    layer.add_(layer.grad, alpha=-RATE / 10)
        return report.flags

    def batch(self) -> Trap:
        generator = torch.Generator().manual_seed(1000 * self.schedule.seed + self.step)
        rows = ROWS + self.script.is_apart("rows")
        return Trap(torch.randn(rows, 4, generator=generator), lambda: self.script.meet("begin"))

    def passes(self, task: Task, options: dict[str, Any]) -> None:
        if self.script.is_apart("plan"):
            options |= {"counts": {"other": len}}
        elif task.kind == "counts":
            options |= {"counts": {"a": self.count, "b": lambda part: (part["x"] > 0).sum()}}
        for tower in self.towers(self.batch(), **options):
            self.meet(tower.index)
            losses = self.model(tower.batch["x"], lambda n, t=tower.index: self.script.meet((t, n)))
            if task.kind == "counts":
                tower.backward({"a": losses.sum(), "b": losses.square().sum()})
            else:
                tower.backward(losses.mean())

    def meet(self, tower: int) -> None:
        """Meet what is planted before a tower's pass; an error of samestep's is one of its own checks."""
        try:
            self.script.meet(tower)
        except UsageError:
            with self.towers._run._failing_together():
                raise

    def count(self, part: Mapping[str, Tensor]) -> int:
        self.script.meet("count")
        return len(part["x"])

    def whole(self, options: dict[str, Any]) -> None:
        towers = [*self.towers.placement.towers(self.towers.job.rank)] * 2  # each forward runs twice

        def forward(part: Mapping[str, Tensor]) -> Tensor:
            tower = towers.pop(0)
            self.script.meet(tower)
            return self.model(part["x"], lambda n: self.script.meet((tower, n)))

        self.towers.whole_batch(self.batch(), forward, lambda outputs, _: outputs.square().mean(), **options)


def weights_on_one_worker(schedule: Schedule) -> list[list[Tensor]]:
    """The same run on one worker, to which nothing happens."""
    job = Job(torch.device("cpu"))
    one = Placement((0, schedule.num_towers))
    tasks = tuple(replace(task, placement=one) for task in schedule.tasks)
    alone = replace(schedule, tasks=tasks, failures=(), apart=None)
    towers = ModelTowers(job, alone, Script(job, alone, []), int)
    all_weights = [towers.weights]
    for task in tasks:
        towers.take(task)
        all_weights.append(towers.weights)
    return all_weights
