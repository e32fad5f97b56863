"""A program that trains in the steps of a schedule, meets what is planted, and notes what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from samestep import Job
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.loop import _is_checkpoint_due
from samestep.errors import LostWorkerError, UsageError
from samestep.workers.collectives import gather_objects

if TYPE_CHECKING:
    from .schedules import Schedule

Place = str | int | tuple[int, int]
"""Where a worker's own code may fail: "begin", "count", "after", before a tower's pass, or in a backward."""

ATTEMPTS = 3
INTERRUPTS = (KeyboardInterrupt, TimeoutError)


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
        apart, here = self.schedule.apart, (self.job.rank, self.step, what)
        return apart is not None and (apart.worker, apart.step, apart.what) == here


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
            # What a signal handler raises may be any exception.
            error = TimeoutError("planted") if event % 5 == 3 else KeyboardInterrupt()
            job.transport.calls[event, is_after] = partial(script.strike, error)

    def ask() -> StopFlags:
        flags = interruption.flags()
        script.note("asked", flags)
        return flags

    towers = do(lambda: kind(job, schedule, script, ask), schedule)
    flags = StopFlags(0)
    while towers.step < len(schedule.tasks) and flags.reason is None:
        flags = take_step(towers, schedule, script)
        if _is_checkpoint_due(towers.step, flags, settings):
            steps = do(lambda: gather_objects(job.transport, towers.step, "checkpoint"), schedule)
            script.note("wrote", steps, towers.weights)
        if flags.reason is not None:
            interruption.acknowledge(flags)
    return towers.step, flags.reason


def do(act: Callable[[], Any], schedule: Schedule) -> Any:
    """Do what all workers do outside of steps, perhaps once more after an interrupt."""
    try:
        return act()
    except INTERRUPTS:
        if not schedule.retries:
            raise
        return act()  # is refused where messages of the first time may be on their way


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
