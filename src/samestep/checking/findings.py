"""Turns the first difference into a finding: where it is, its likely cause, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.checking.causes import cause_of
from samestep.checking.recording import Difference, Recording, Turn, When
from samestep.checking.surroundings import OPTIMIZER, Place
from samestep.errors import BufferPolicyError, DisagreementError, LostWorkerError, UsageError

__all__ = ["Finding", "explain", "explain_disagreement", "explain_error", "explain_vanished", "fault_of"]


@dataclass(frozen=True)
class Finding:
    """Where a model first gives different bits, why, and what to do about it.

    Attributes:
        what: the fault in a few words.
        module: path and class of the first module, or "the loss function", or "the optimizer".
        operator: the first operator, and the phase in which it ran.
        parameter: the first parameter with another gradient, or buffer with another value.
        cause: the likely cause.
        remedy: what to do about it.
    """

    what: str
    module: str | None
    operator: str | None
    parameter: str | None
    cause: str
    remedy: str

    def __str__(self) -> str:
        names = ("module", "operator", "parameter", "cause", "remedy")
        lines = [(name, getattr(self, name)) for name in names]
        return "\n".join([self.what, *(f"  {name:<9}  {text}" for name, text in lines if text)])


def _finding(what: str, cause: str, remedy: str, *, module: str = "", parameter: str = "") -> Finding:
    return Finding(what, module or None, None, parameter or None, cause, remedy)


def explain(difference: Difference, num_workers: int) -> Finding:
    """Explain a difference between the recordings of one worker and of `num_workers`."""
    event = difference.event
    cause, remedy = cause_of(difference, num_workers)
    operator = f"{event.name}, {event.phase}" if event.kind == "operator" else None
    what = _differ(difference.when, num_workers)
    return Finding(what, event.module or None, operator, difference.parameter, cause, remedy)


def explain_vanished(difference: Difference, num_workers: int, compiled_again: When | None) -> Finding:
    """Explain a difference that disappeared when every operator was watched."""
    if compiled_again is not None:
        cause = (
            "the difference disappeared without torch.compile, whose code depends on the shapes that a "
            f"worker has met before: it compiled again in {compiled_again}"
        )
        remedy = "compile with dynamic=False, or let T divide the batch"
    else:
        cause = (
            "the difference disappeared while every operator was watched: a kernel that adds in the order in "
            "which threads arrive, a race with another thread, code that watching switches off "
            "(torch.compile), or a build() that does something else each time"
        )
        remedy = (
            "check again; try torch.use_deterministic_algorithms(True), and the model without torch.compile"
        )
    return _finding(
        _differ(difference.when, num_workers), cause, remedy, parameter=difference.parameter or ""
    )


def explain_error(recordings: Sequence[Recording]) -> Finding | None:
    """Explain an error that samestep raised on all workers.

    Raises:
        Error: the recorded error itself, if its message needs no explanation.
    """
    failed = [recording for recording in recordings if recording.error is not None]
    if not failed:
        return None
    first = min(failed, key=lambda recording: isinstance(recording.error, LostWorkerError))
    assert first.error is not None
    if isinstance(first.error, DisagreementError):
        return explain_disagreement(first.error)
    *_, last, end = first.turns.values()
    if isinstance(first.error, UsageError):
        return _finding(f"cannot train: samestep refuses {last.when}", str(first.error), "")
    if not isinstance(first.error, BufferPolicyError):
        raise first.error
    cause, _, remedy = str(first.error).partition(": ")
    changed = [
        place for place, held in end.held.items() if last.held.get(place) != held and place.name in cause
    ]
    place = next(iter(changed), Place("", ""))
    what = f"cannot train: a buffer that is not averaged changes in {last.when}"
    return _finding(what, cause, remedy, module=place.owner, parameter=place.name)


def explain_disagreement(error: DisagreementError) -> Finding:
    """Explain that the workers themselves found that they differ."""
    return _finding(
        "cannot train: the workers do not agree",
        str(error),
        "let build() and the batches depend only on what is the same in every process",
    )


def fault_of(recordings: Sequence[Recording]) -> Finding | None:
    """Return a fault that shows in one recording alone."""
    for recording in recordings:
        for turn in recording.turns.values():
            finding = _changed_settings(recording, turn) or _written_parameter(turn)
            if finding is not None:
                return finding
        if recording.unaveraged:
            return _unaveraged(recording)
    return None


def _changed_settings(recording: Recording, turn: Turn) -> Finding | None:
    """Find that a turn changed a setting of its process, such as the number of threads."""
    changes = [
        f"{name} from {recording.settings[name]} to {value}"
        for name, value in turn.settings.items()
        if value != recording.settings[name]
    ]
    if not changes:
        return None
    return _finding(
        f"not the same bits everywhere: {turn.when} changes a setting of its process",
        f"it sets {', '.join(changes)}, in this process only, and kernels may give different bits from here "
        "on",
        "leave it out of the passes: threads is an option of samestep.init, check and train, and the rest is "
        "to be set before the model is built, in every process",
        module=next((event.module for event in turn.events if event.kind == "setting"), ""),
    )


def _written_parameter(turn: Turn) -> Finding | None:
    """Find that a tower's pass wrote to a parameter of the model."""
    name, owner = next(iter(turn.written.items()), ("", ""))
    if not name:
        return None
    writer = next((event for event in turn.events if f"parameter {name}" in event.wrote), None)
    return Finding(
        f"not the same bits: the pass of {turn.when} writes to a parameter",
        writer.module if writer else owner,
        f"{writer.name}, {writer.phase}" if writer else None,
        name,
        "later towers on the same worker see different weights than towers on other workers, and the workers "
        "end with different weights",
        "write to it between steps, after the optimizer's update (max_norm= too); or make it a buffer that "
        "Towers(..., buffers={...}) gives a policy",
    )


def _unaveraged(recording: Recording) -> Finding:
    """Find that the optimizer updates tensors that are not parameters of the model."""
    names = ", ".join(recording.unaveraged)
    return _finding(
        "cannot train: the optimizer updates tensors that are not parameters of the model",
        f"gradients are not averaged for {names}: each worker would follow only its own towers",
        "make it part of the model that Towers is given: an nn.Parameter or a submodule of it",
        module=OPTIMIZER,
        parameter=recording.unaveraged[0],
    )


def _differ(when: When, num_workers: int) -> str:
    if num_workers == 1:
        return f"not the same bits: two runs of one worker differ first in {when}"
    return f"not the same bits: one worker and {num_workers} workers differ first in {when}"
