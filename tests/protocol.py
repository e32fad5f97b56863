"""A program that trains, and steps without a model: what `Towers` says to other workers, around plain tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep import Job
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.training import _is_checkpoint_due
from samestep.errors import AbandonedError, DisagreementError, Error, LostWorkerError, UsageError
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import ParameterLayout, Plan
from samestep.summation.scalars import TowerScalars
from samestep.workers.agreement import agree
from samestep.workers.collectives import broadcast, gather_objects, gather_rows

from .oracle import add, tree

if TYPE_CHECKING:
    from .schedules import Schedule, Task

Place = str | int | tuple[int, int]
"""Where a worker's own code may fail: "begin", "count", "after", before a tower's pass, or in its backward."""

ATTEMPTS = 3
RATE = 0.5
ROWS = 15
NOTHING = torch.zeros(0, dtype=torch.float64)


# ---- what is noted -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """What a worker did, in which attempt at which step; None outside of steps."""

    rank: int
    kind: str  # "asked" for flags, "struck" by what was planted, "took" or "left" a step, "wrote", "ended"
    step: int | None
    attempt: int | None
    event: int  # how many events there had been in the world
    value: Any = None  # flags, an error, the step of a checkpoint
    weights: list[Tensor] | None = None


class Script:
    """What is planted for one worker, and what it notes."""

    def __init__(self, job: Job, schedule: Schedule, log: list[Note]) -> None:
        self.job, self.schedule, self.log = job, schedule, log
        self.step: int | None = None
        self.attempt: int | None = None
        self.leaves = False  # whether the program ends with what struck, and tells nobody

    def note(self, kind: str, value: Any = None, weights: list[Tensor] | None = None) -> None:
        event = len(self.job.transport.world.events)
        self.log.append(Note(self.job.rank, kind, self.step, self.attempt, event, value, weights))

    def meet(self, place: Place) -> None:
        """Raise what is planted here."""
        for planted in self.schedule.failures:
            here = (self.job.rank, self.step, self.attempt, place)
            if (planted.worker, planted.step, planted.attempt, planted.place) == here:
                self.leaves = planted.how == "leave"
                self.strike((UsageError if planted.how == "tell" else KeyError)("planted"), place)

    def strike(self, error: BaseException, place: Place = "anywhere") -> None:
        self.note("struck", (error, place))
        raise error

    def is_apart(self, what: str) -> bool:
        apart = self.schedule.apart
        return apart is not None and (apart.worker, apart.step, apart.what) == (self.job.rank, self.step, what)


# ---- the program -------------------------------------------------------------------------------------


def train(job: Job, schedule: Schedule, log: list[Note], kind: Callable[..., Any]) -> tuple[int, str | None]:
    """Take all steps, with checkpoints and stops as `samestep train` decides on them."""
    script = Script(job, schedule, log)
    script.note("began")
    try:
        return take_steps(job, schedule, script, kind)
    except BaseException as error:
        script.note("ended", error)
        raise


def take_steps(
    job: Job, schedule: Schedule, script: Script, kind: Callable[..., Any]
) -> tuple[int, str | None]:
    settings = SimpleNamespace(checkpoint_every=schedule.checkpoint_every, steps=len(schedule.tasks))
    interruption = Interruption(
        job, max_seconds=schedule.max_seconds, checkpoint_minutes=schedule.checkpoint_minutes
    )
    for worker, event, is_after in schedule.signals:
        if worker == job.rank:
            job.transport.calls[event, is_after] = lambda: interruption.acknowledge(StopFlags.SIGTERM)
    for worker, event, is_after in schedule.interrupts:
        if worker == job.rank:
            job.transport.calls[event, is_after] = lambda: script.strike(KeyboardInterrupt())

    def ask() -> StopFlags:
        flags = interruption.flags()
        script.note("asked", flags)
        return flags

    towers = kind(job, schedule, script, ask)
    flags = StopFlags(0)
    while towers.step < len(schedule.tasks) and flags.reason is None:
        flags = take_step(towers, schedule, script)
        if _is_checkpoint_due(towers.step, flags, settings):
            steps = gather_objects(job.transport, towers.step, "checkpoint")
            script.note("wrote", steps, towers.weights)
        if flags.reason is not None:
            interruption.acknowledge(flags)
    return towers.step, flags.reason


def take_step(towers: Any, schedule: Schedule, script: Script) -> StopFlags:
    """Take a step, perhaps after attempts that were abandoned."""
    for attempt in range(ATTEMPTS):
        script.step, script.attempt = towers.step, attempt
        try:
            flags = StopFlags(towers.take(schedule.tasks[towers.step]))
            script.note("took", flags, towers.weights)
            script.step = script.attempt = None
            return flags
        except LostWorkerError as error:
            script.note("left", error)
            raise
        except (Exception, KeyboardInterrupt) as error:
            if script.leaves:
                raise
            towers.abandon()  # refuses where others may have taken the step
            script.note("left", error)
            if not schedule.retries or attempt + 1 == ATTEMPTS:
                raise
    raise AssertionError


# ---- a step without a model --------------------------------------------------------------------------


class Parameter:
    """As much of a parameter as a gradient sum asks for; `accumulate` stands for autograd."""

    dtype = grad_dtype = torch.float32

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
        for position, average in averages:
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
            raise UsageError(f"step {self.step} was interrupted, when other workers may have taken it")
        if self.exchange is None:
            return
        cause = sys.exception()
        with contextlib.suppress(AbandonedError, DisagreementError):
            self.leave(AbandonedError(f" after {type(cause).__name__}: {cause}"))

    def leave(self, error: Error) -> None:
        """As `Towers._leave`."""
        self.sums.clear()
        try:
            self.exchange.fail(error)
        except Exception:
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
            self.abandon()
            raise


@lru_cache(maxsize=1000)
def plan_for(
    placement: Placement, trained: tuple[int, ...], key: tuple[Any, ...], sums: tuple[str, ...], *, is_whole: bool
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
