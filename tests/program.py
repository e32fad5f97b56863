"""A program that takes the steps of a schedule, raises the injected errors, and logs what it does."""

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
"""Where a worker's own code may fail: "begin", "count", "after", a tower (before its pass), or a tower and a
parameter (in its backward)."""

ATTEMPTS = 3
INTERRUPTS = (KeyboardInterrupt, TimeoutError)


# ---- the log -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """What a worker did; `step` and `attempt` are None outside of steps."""

    rank: int
    # "began", "asked" for flags, "raised" an injected error, "took" or "left" a step, "wrote" a checkpoint,
    # or "ended" by an error
    kind: str
    step: int | None
    attempt: int | None
    event: int  # the number of events in the world so far
    value: Any = None  # flags, an error, an (error, place), or the steps of a checkpoint on all workers
    weights: list[Tensor] | None = None


class Script:
    """The errors injected into one worker, and its log."""

    def __init__(self, job: Job, schedule: Schedule, log: list[Note]) -> None:
        self.job, self.schedule, self.log = job, schedule, log
        self.step: int | None = None
        self.attempt: int | None = None
        self.leaves = False  # whether the program ends with the injected error, without `abandon`

    def note(self, kind: str, value: Any = None, weights: list[Tensor] | None = None) -> None:
        event = len(self.job.transport.world.events)
        self.log.append(Note(self.job.rank, kind, self.step, self.attempt, event, value, weights))

    def meet(self, place: Place) -> None:
        """Raise the error that is injected here, if any."""
        for injected in self.schedule.failures:
            here = (self.job.rank, self.step, self.attempt, place)
            if (injected.worker, injected.step, injected.attempt, injected.place) == here:
                self.leaves = injected.how == "leave"
                self.throw((UsageError if injected.how == "tell" else KeyError)("injected"), place)

    def throw(self, error: BaseException, place: Place = "anywhere") -> None:
        self.note("raised", (error, place))
        raise error

    def is_apart(self, what: str) -> bool:
        apart, here = self.schedule.apart, (self.job.rank, self.step, what)
        return apart is not None and (apart.worker, apart.step, apart.what) == here


# ---- the program -------------------------------------------------------------------------------------


def train(job: Job, schedule: Schedule, log: list[Note], kind: Callable[..., Any]) -> tuple[int, str | None]:
    """Take all steps; write checkpoints and stop as `samestep train` would."""
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
            # A signal handler may raise any exception.
            error = TimeoutError("injected") if event % 5 == 3 else KeyboardInterrupt()
            job.transport.calls[event, is_after] = partial(script.throw, error)

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
    """Do something that all workers do outside of steps; repeat it after an interrupt if `retries`."""
    try:
        return act()
    except INTERRUPTS:
        if not schedule.retries:
            raise
        return act()  # raises if messages of the first call may still be on their way


def take_step(towers: Any, schedule: Schedule, script: Script) -> StopFlags:
    """Take a step; repeat it after an abandoned attempt if the schedule retries."""
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
            towers.abandon()  # raises if others may have taken the step
            script.note("left", error)
            if not schedule.retries or attempt + 1 == ATTEMPTS:
                raise
    raise AssertionError
