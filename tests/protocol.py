"""Steps without a model: what `Towers` says to other workers, around plain tensors; and what is right."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep import Job
from samestep.errors import AbandonedError, DisagreementError, Error, UsageError
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import ParameterLayout, Plan
from samestep.summation.scalars import TowerScalars
from samestep.workers.agreement import agree
from samestep.workers.collectives import broadcast, gather_rows

from .oracle import add, tree
from .program import Script

if TYPE_CHECKING:
    from .schedules import Schedule, Task

RATE = 0.5
ROWS = 15
NOTHING = torch.zeros(0, dtype=torch.float64)


class Parameter:
    """As much of a parameter as a gradient sum asks for; `accumulate` stands for autograd."""

    dtype = grad_dtype = torch.float32
    requires_grad = True

    def __init__(self) -> None:
        self.grad: Tensor | None = None
        self.hooks: list[Callable[[Any], None]] = []

    def is_complex(self) -> bool:
        return False

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> None:
        self.hooks.append(hook)

    def accumulate(self, gradient: Tensor) -> None:
        self.grad = gradient if self.grad is None else self.grad + gradient
        for hook in self.hooks:
            hook(self)


@dataclass(frozen=True)
class Rate:
    """A setting that must be the same on all workers."""

    rate: float

    def hash(self) -> int:
        return hash(self.rate)

    def hash_beside(self) -> int:
        return 0

    def late_hash(self) -> int:
        return 0

    def hash_of_passes(self) -> int:
        return 0

    def in_words(self) -> dict[str, object]:
        return {"rate": self.rate}


class PlainTowers:
    """What `Towers` does in a step, but for the model: the same calls of the exchange, in the same order."""

    def __init__(self, job: Job, schedule: Schedule, script: Script, flags: Callable[[], int]) -> None:
        self.job, self.schedule, self.script, self.flags = job, schedule, script, flags
        self.step = 0
        self.weights = first_weights(schedule)
        self.plan = self.plan_of(schedule.tasks[0])
        self.exchange: Exchange | None = None
        self.opening: Exchange | None = None
        agree(job, {"towers": schedule.num_towers, **self.plan.description}, where="Towers")
        self.share_weights()

    def share_weights(self) -> None:
        weights = [weight.clone() for weight in self.weights]
        broadcast(self.job.transport, weights, "the first worker's weights")
        self.weights = weights

    def plan_of(self, task: Task) -> Plan:
        s = self.schedule
        key = (s.sizes, s.sparse, s.bucket_bytes, s.in_shards)
        sums = ("a", "b") if task.kind == "counts" else ()
        if self.script.is_apart("plan"):
            return plan_for(task.placement, task.trained, key, ("other",), is_whole=False)
        return plan_for(task.placement, task.trained, key, sums, is_whole=task.kind == "whole")

    def take(self, task: Task) -> int:
        """Take a step; return the flags of all workers."""
        self.begin(task)
        self.prepare(task)
        with self.ending_on_error() if task.kind == "whole" else contextlib.nullcontext():
            for tower in self.plan.placement.towers(self.job.rank):
                self.run(task, tower)
        self.script.meet("after")
        return self.average(task)

    def begin(self, task: Task) -> None:
        """As `Towers._begin`."""
        self.abandon()
        plan, error = self.plan, None
        numbers = {"step": self.step, "rows": ROWS + self.script.is_apart("rows")}
        try:
            plan = self.plan_of(task)
            self.script.meet("begin")
        except Exception as found:
            error = found
        if error is not None or plan.fingerprint != self.plan.fingerprint:
            self.opening = opening = Exchange(self.job, self.plan, numbers)
            with opening.unbroken():
                if error is not None:
                    opening.fail(error)
                opening.change_to(plan)
                self.share_weights()
        self.plan = plan
        rest = Rate(RATE + self.script.is_apart("rate"))
        self.exchange = Exchange(self.job, plan, numbers, rest=rest, flags=self.flags)
        self.parameters = [Parameter() for _ in plan.parameters]
        self.sums = GradientSum(plan, self.parameters, plan.placement.towers(self.job.rank))
        self.sums.start(self.exchange, measures=False)

    def prepare(self, task: Task) -> None:
        """As `StepRun.count` and `run_whole_batch`."""
        towers = self.plan.placement.towers(self.job.rank)
        with self.ending_on_error():
            if task.kind == "counts":
                try:
                    self.script.meet("count")
                except Exception as error:
                    self.exchange.fail(error)
                counts = torch.tensor([[count_of(self.step, t), 1.0] for t in towers], dtype=torch.float64)
                self.exchange.compare(counts)
            elif task.kind == "whole":
                with self.exchange.unbroken():
                    self.exchange.compare(torch.zeros(len(towers), 0, dtype=torch.float64))
                    self.gather("outputs")

    def run(self, task: Task, tower: int) -> None:
        """As `StepRun.add`."""
        towers = self.plan.placement.towers(self.job.rank)
        try:
            self.script.meet(tower)
        except Error as error:
            self.exchange.fail(error)
        if tower == towers[-1]:
            ones = torch.ones(self.plan.num_sums)
            scalars = [TowerScalars(count_of(self.step, t), ones, NOTHING, NOTHING) for t in towers]
            self.exchange.start(scalars)
        self.sums.backward(tower, lambda: self.backward(task, tower), is_last=tower == towers[-1])

    def backward(self, task: Task, tower: int) -> None:
        for index, parameter in reversed(list(zip(task.trained, self.parameters, strict=True))):
            self.script.meet((tower, index))
            gradient = gradient_of(self.schedule, self.step, tower, index, self.weights[index])
            if gradient is not None:
                parameter.accumulate(gradient.to_sparse() if index in self.schedule.sparse else gradient)

    def average(self, task: Task) -> int:
        """As `Towers.average`."""
        with self.ending_on_error():
            averages = self.sums.finish()
            if task.is_measured:
                self.gather("norms")
        for position, _, average in averages:
            if average is not None:
                index = task.trained[position]
                step = average.to_dense() if average.is_sparse else average
                self.weights = replaced(self.weights, index, self.weights[index] - RATE * step)
        exchange, self.exchange = self.exchange, None
        self.step += 1
        return exchange.flags

    def gather(self, what: str) -> None:
        sizes = [len(towers) for towers in self.plan.placement.ranges]
        gather_rows(self.job.transport, torch.ones(sizes[self.job.rank]), sizes, what)

    def abandon(self) -> None:
        """As `Towers.abandon`."""
        exchange = self.exchange or self.opening
        if exchange is not None and exchange.is_committed:
            self.job.transport.give_up(exchange.where)
            raise UsageError(f"step {self.step} was interrupted, and other workers may have completed it")
        self.opening = None
        if self.exchange is None:
            return
        cause = sys.exception()
        with contextlib.suppress(AbandonedError, DisagreementError):
            self.leave(AbandonedError(f" after {type(cause).__name__}: {cause}".removesuffix(": ")))

    def leave(self, error: Error) -> None:
        """As `Towers._leave`."""
        self.sums.clear()
        try:
            self.exchange.fail(error)
        except Exception as raised:
            if raised is error:
                self.exchange = None
            raise

    @contextlib.contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """As `Towers._ending_on_error`."""
        try:
            yield
        except Error as error:
            self.leave(error)
        except Exception:
            if not self.exchange.is_committed:
                self.abandon()
            raise


@lru_cache(maxsize=1000)
def plan_for(
    placement: Placement,
    trained: tuple[int, ...],
    key: tuple[Any, ...],
    sums: tuple[str, ...],
    *,
    is_whole: bool,
) -> Plan:
    sizes, sparse, bucket_bytes, _ = key
    layouts = tuple(
        ParameterLayout(f"p{n}", Layout((sizes[n],), (1,), torch.float32), torch.float32, n in sparse)
        for n in trained
    )
    plan = Plan.of(placement, layouts, bucket_bytes=bucket_bytes)
    return Plan(plan.placement, plan.parameters, plan.buckets, sums=sums, is_whole_batch=is_whole)


# ---- what is right -----------------------------------------------------------------------------------


def first_weights(schedule: Schedule) -> list[Tensor]:
    return [NOISE[n : n + size].clone() for n, size in enumerate(schedule.sizes)]


def _noise() -> Tensor:
    """Numbers of which a sum depends on its parentheses."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-6, 7, (2048,), generator=generator)
    return torch.randn(2048, generator=generator) * 2.0**exponents


NOISE = _noise()


def gradient_of(schedule: Schedule, step: int, tower: int, index: int, weight: Tensor) -> Tensor | None:
    if (step + 2 * tower + index) % 5 == 0:
        return None
    start = (101 * step + 37 * tower + 11 * index + schedule.seed) % 2000
    return NOISE[start : start + len(weight)] + weight * 0.25


def count_of(step: int, tower: int) -> float:
    return 1.0 + (step + tower) % 3


def replaced(weights: list[Tensor], index: int, weight: Tensor) -> list[Tensor]:
    return [weight if n == index else each for n, each in enumerate(weights)]


def weights_after_each_step(schedule: Schedule) -> list[list[Tensor]]:
    """The run on nobody's workers: each step's gradients added along the tree, and divided."""
    all_weights = [first_weights(schedule)]
    for step, task in enumerate(schedule.tasks):
        weights = before = all_weights[-1]
        count = sum(count_of(step, tower) for tower in range(schedule.num_towers))
        for index in task.trained:
            leaves = [
                gradient_of(schedule, step, tower, index, before[index])
                for tower in range(schedule.num_towers)
            ]
            total = tree(leaves, add)
            if total is not None:
                weights = replaced(weights, index, before[index] - RATE * (total / count))
        all_weights.append(weights)
    return all_weights
