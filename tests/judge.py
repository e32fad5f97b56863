"""Judges a run by rules that depend only on the faults that were injected, not on the implementation.

1. A worker takes a step with the right weights and with the flags of all workers, or it leaves the step.
2. No worker takes a step that another one has left by an exception of its own, or in which values differ.
3. A worker that leaves a step raises its own exception; or an error that names all workers with exceptions;
   or an error that says which worker has another value; or, after a loss, that a worker is gone or silent.
4. A worker that ends without an error has taken all steps, or all up to a stop flag. Checkpoints were written
   on all workers alike, after the steps that the settings and the flags determine.
5. A worker is reported as silent only if a worker has stopped or stalled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.app.interruption import StopFlags
from samestep.errors import AbandonedError, DisagreementError, LostWorkerError, UsageError

from .program import INTERRUPTS, Note, Place
from .protocol import RATE, ROWS
from .simulation import TIMEOUT, Killed, Outcome, World

if TYPE_CHECKING:
    from .schedules import Schedule

REFUSED = "other workers may have completed it"
GAVE_UP = "was interrupted in the middle of"
FATAL = ("killed", "stopped", "stalled")


@dataclass
class Trial:
    """A schedule and the results of its run."""

    schedule: Schedule
    world: World
    log: list[Note]
    outcomes: list[Outcome]
    expected: list[list[Tensor]]  # the weights after each step

    def __post_init__(self) -> None:
        self.losses = {**self.silent_ends(), **self.faults()}  # lost workers, by event
        self.attempts: dict[tuple[int, int], list[Note]] = defaultdict(list)
        for note in self.log:
            if note.step is not None:
                self.attempts[note.step, note.attempt].append(note)

    def faults(self) -> dict[int, int]:
        """Return the workers that were killed, stopped, or stalled for longer than the timeout, by event."""
        return {
            number: rank
            for number, (rank, kind, _, _) in enumerate(self.world.events)
            if kind in FATAL and not (kind == "stalled" and self.schedule.faults.stalled[rank][1] < TIMEOUT)
        }

    def silent_ends(self) -> dict[int, int]:
        """Return the workers that ended by another exception than they left a step with, by event."""
        left = {id(note.value) for note in self.log if note.kind == "left"}
        return {
            note.event: note.rank
            for note in self.log
            if note.kind == "ended"
            and id(note.value) not in left
            and (GAVE_UP in str(note.value) or not isinstance(note.value, (LostWorkerError, Killed)))
        }

    def is_lost(self, rank: int) -> bool:
        return rank in self.losses.values()

    def follows_a_loss(self, note: Note) -> bool:
        return any(event <= note.event for event in self.losses)


def judge(trial: Trial) -> Counter[str]:
    """Raise an `AssertionError` if a rule is broken; return counts of what happened."""
    for notes in trial.attempts.values():
        judge_attempt(trial, notes)
    for note in trial.log:
        if note.kind == "ended":
            judge_last_error(trial, note)
    for rank, outcome in enumerate(trial.outcomes):
        if not trial.is_lost(rank):
            judge_end(trial, rank, outcome)
    judge_checkpoints(trial)
    return happened(trial)


# ---- attempts at a step ------------------------------------------------------------------------------


def judge_attempt(trial: Trial, notes: Sequence[Note]) -> None:
    asked = [note for note in notes if note.kind == "asked"]
    kind = trial.schedule.tasks[notes[0].step].kind
    raised = {note.rank: words_of(*note.value, kind) for note in reversed(notes) if note.kind == "raised"}
    left = [note for note in notes if note.kind == "left"]
    for note in notes:
        if note.kind == "took":
            judge_taken(trial, note, asked)
            leavers = [text_of(each) for each in left if each.rank in raised]
            assert not leavers, f"{text_of(note)}, but {leavers}"
        elif note.kind == "left":
            judge_left(trial, note, raised, {each.rank for each in left})


def judge_taken(trial: Trial, note: Note, asked: Sequence[Note]) -> None:
    apart = trial.schedule.apart
    assert apart is None or apart.step != note.step, f"{text_of(note)}, but {apart}"
    everybody = set(range(trial.schedule.num_workers))
    assert {each.rank for each in asked} == everybody, f"{text_of(note)}: not all were asked for flags"
    flags = StopFlags(0)
    for each in asked:
        flags |= each.value
    assert note.value == flags, f"{text_of(note)} with the flags {note.value}, expected {flags}"
    judge_weights(trial, note, note.step + 1)


def judge_weights(trial: Trial, note: Note, step: int) -> None:
    pairs = zip(note.weights, trial.expected[step], strict=True)
    assert all(torch.equal(found, right) for found, right in pairs), f"{text_of(note)}: wrong weights"


def judge_left(trial: Trial, note: Note, raised: dict[int, str], left: set[int]) -> None:
    error = note.value
    own = [each.value[0] for each in trial.log if each.kind == "raised" and each.rank == note.rank]
    if any(error is each for each in own):
        return
    assert note.rank not in raised, f"{text_of(note)}, but it {raised[note.rank]}"
    if isinstance(error, LostWorkerError):
        judge_loss(trial, note)
    else:
        right = {f"{type(each).__name__}: {each}" for each in errors_for(trial, note.step, raised, left)}
        found = f"{type(error).__name__}: {error}"
        assert found in right, f"{text_of(note)}, expected one of {sorted(right)}"


def judge_loss(trial: Trial, note: Note) -> None:
    own = [each.value[0] for each in trial.log if each.kind == "raised" and each.rank == note.rank]
    if GAVE_UP in str(note.value) and any(isinstance(error, INTERRUPTS) for error in own):
        return
    assert trial.follows_a_loss(note), f"{text_of(note)}, but nobody was lost"
    if "did not answer" in str(note.value):
        kinds = {kind for _, kind, _, _ in trial.world.events[: note.event]}
        assert kinds & {"stopped", "stalled"}, f"{text_of(note)}, but nobody was silent"


def errors_for(trial: Trial, step: int, raised: dict[int, str], left: set[int]) -> Iterable[Exception]:
    """Yield the errors that workers without exceptions may raise.

    A worker that failed and has not left the step may be missing in the message.
    """
    certain = {rank for rank in raised if rank in left}
    for others in subsets(set(raised) - certain):
        failed = sorted(certain | set(others))
        words = "; ".join(f"worker {rank} {raised[rank]}" for rank in failed)
        if failed:
            are_abandoned = all(raised[rank].startswith("abandoned") for rank in failed)
            yield (AbandonedError if are_abandoned else DisagreementError)(f"step {step}: {words}")
        elif trial.schedule.apart is not None and trial.schedule.apart.step == step:
            yield from (DisagreementError(f"step {step}: {text}") for text in differences(trial.schedule))


def subsets(ranks: Iterable[int]) -> Iterable[tuple[int, ...]]:
    ranks = list(ranks)
    return chain.from_iterable(combinations(ranks, number) for number in range(len(ranks) + 1))


def words_of(error: BaseException, place: Place, kind: str) -> str:
    """Return how other workers' errors describe an exception.

    After an error of samestep's checks the step has failed; user code abandons it. Functions that count, and
    `whole_batch`, run user code inside samestep.
    """
    name = f"{type(error).__name__}: {error}".removesuffix(": ")
    is_own = isinstance(error, UsageError)
    is_inside = isinstance(place, int) or (kind == "whole" and isinstance(place, tuple))
    if place in ("begin", "count") or (is_own and is_inside):
        return f"failed: {error if is_own else name}"
    return f"abandoned the step after {name}"


def differences(schedule: Schedule) -> list[str]:
    """Return the possible descriptions of the difference; see `who_has_what` for the order of workers."""
    apart, usual = schedule.apart, schedule.tasks[schedule.apart.step]
    loss = {"plain": "one sum", "counts": "'a', 'b'", "whole": "of the whole batch"}[usual.kind]
    name, values = {
        "rows": ("rows", (ROWS + 1, ROWS)),
        "rate": ("rate", (RATE + 1, RATE)),
        "plan": ("loss", ("'other'", loss)),
    }[apart.what]
    if schedule.num_workers > 2:
        return [f"worker {apart.worker} has {name} = {values[0]}, the others have {values[1]}"]
    said = [f"worker {n} has {name} = {values[n != apart.worker]}" for n in range(2)]
    return [", ".join(said)]


# ---- the end -----------------------------------------------------------------------------------------


def judge_last_error(trial: Trial, note: Note) -> None:
    """A program ends by an injected error, by the error with which it left a step, or because of a loss."""
    own = [each for each in trial.log if each.rank == note.rank]
    errors = [each.value[0] for each in own if each.kind == "raised"]
    is_late = any(isinstance(error, INTERRUPTS) for error in errors) and REFUSED in str(note.value)
    errors += [each.value for each in own if each.kind == "left"]
    if isinstance(note.value, LostWorkerError):
        judge_loss(trial, note)
    elif not (is_late or isinstance(note.value, Killed)):
        assert any(note.value is error for error in errors), f"{text_of(note)}, which nobody injected"


def judge_end(trial: Trial, rank: int, outcome: Outcome) -> None:
    own = [note for note in trial.log if note.rank == rank]
    if outcome.error is not None:
        ended = own[-1]
        assert ended.kind == "ended", f"worker {rank} was not over: {outcome.text}"
        return
    taken = [note for note in own if note.kind == "took"]
    stops = [note.step + 1 for note in taken if note.value.reason is not None]
    steps = min([*stops, len(trial.schedule.tasks)])
    assert [note.step for note in taken] == [*range(steps)], f"worker {rank} took {[n.step for n in taken]}"
    end = steps, taken[-1].value.reason
    assert outcome.value == end, f"worker {rank} ended with {outcome.value}, expected {end}"
    assert checkpoints_of(own) == due(trial, taken), f"worker {rank} wrote {checkpoints_of(own)}"


def due(trial: Trial, taken: Sequence[Note]) -> list[int]:
    """Return the steps after which a checkpoint must be written."""
    every, last = trial.schedule.checkpoint_every, len(trial.schedule.tasks)
    return [
        note.step + 1
        for note in taken
        if (note.step + 1) % every == 0 or note.step + 1 == last or note.value  # any flag
    ]


def checkpoints_of(notes: Sequence[Note]) -> list[int]:
    return [note.value[0] for note in notes if note.kind == "wrote"]


def judge_checkpoints(trial: Trial) -> None:
    for note in trial.log:
        if note.kind == "wrote":
            steps = note.value
            assert steps == steps[:1] * trial.schedule.num_workers, f"{text_of(note)}: checkpoints of {steps}"
            judge_weights(trial, note, steps[0])
    taken = {note.step: note for note in trial.log if note.kind == "took"}
    written = set(checkpoints_of(trial.log))
    assert written <= set(due(trial, [*taken.values()])), f"checkpoints of {written}"


def text_of(note: Note) -> str:
    value = f"{type(note.value).__name__}: {note.value}" if isinstance(note.value, BaseException) else ""
    return f"worker {note.rank} {note.kind} step {note.step}, attempt {note.attempt} {value}".rstrip()


def happened(trial: Trial) -> Counter[str]:
    """Count the faults, steps and checkpoints, and how workers ended."""
    seen = Counter({"schedules": 1})
    for _, kind, _, _ in trial.world.events:
        if kind not in FATAL:
            seen[f"messages: {kind}s"] += 1
    for _, kind in {(rank, kind) for rank, kind, _, _ in trial.world.events if kind in FATAL}:
        seen[f"workers {kind}"] += 1
    for note in trial.log:
        if note.kind == "raised":
            seen[f"workers that raised {type(note.value[0]).__name__}"] += 1
        elif note.kind in ("took", "left", "wrote"):
            seen[
                {
                    "took": "steps taken, by worker",
                    "left": "steps left, by worker",
                    "wrote": "checkpoints, by worker",
                }[note.kind]
            ] += 1
    for outcome in trial.outcomes:
        seen[f"workers ended: {type(outcome.error).__name__ if outcome.error else 'without an error'}"] += 1
    return seen
