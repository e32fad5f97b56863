"""From the first difference to a finding: what is likely to have caused it, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.checking.causes import cause_of
from samestep.checking.recorder import ChangedBufferError
from samestep.checking.recording import Difference, Recording, When
from samestep.errors import DisagreementError

__all__ = [
    "Finding",
    "changed_settings",
    "explain",
    "explain_buffers",
    "explain_disagreement",
    "explain_vanished",
]


@dataclass(frozen=True)
class Finding:
    """Where a model first breaks the promise, why, and what to do.

    Attributes:
        what: the fault in a few words.
        module: path and class of the first module, or "the loss function", or "the optimizer".
        operator: the first operator, and the phase it ran in.
        parameter: the first parameter with another gradient, or buffer with another value.
        cause: what is likely to have caused it.
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


def explain(difference: Difference, num_workers: int) -> Finding:
    """Explain a difference between the recordings of one worker and of `num_workers`."""
    event = difference.event
    cause, remedy = cause_of(difference, num_workers)
    return Finding(
        _differ(difference.when, num_workers),
        event.module or None,
        f"{event.name}, {event.phase}" if event.kind == "operator" else None,
        difference.parameter,
        cause,
        remedy,
    )


def explain_vanished(difference: Difference, num_workers: int) -> Finding:
    """Explain a difference that was gone when every operator was watched."""
    return Finding(
        _differ(difference.when, num_workers),
        None,
        None,
        difference.parameter,
        "the difference was gone while every operator was watched: a kernel that adds in the order in which "
        "threads arrive, a race with another thread, or code that watching switches off (torch.compile)",
        "check again; try torch.use_deterministic_algorithms(True), and the model without torch.compile",
    )


def explain_buffers(error: ChangedBufferError) -> Finding:
    """Explain that a tower changed a buffer that is not averaged."""
    place = error.places[0] if error.places else None
    cause, _, remedy = error.message.partition(": ")
    return Finding(
        f"cannot train: a buffer that is not averaged changes in {error.when}",
        place.owner if place else None,
        None,
        place.name if place else None,
        cause,
        remedy,
    )


def explain_disagreement(error: DisagreementError) -> Finding:
    """Explain that workers found out by themselves that they differ."""
    return Finding(
        "cannot train: the workers do not agree",
        None,
        None,
        None,
        str(error),
        "let build() and the batches depend only on what is the same in every process",
    )


def changed_settings(recordings: Sequence[Recording]) -> Finding | None:
    """Look for a turn that changed a setting of its process, such as the number of threads."""
    for recording in recordings:
        for when, turn in recording.turns.items():
            changes = [
                f"{name} from {recording.settings[name]} to {value}"
                for name, value in turn.settings.items()
                if value != recording.settings[name]
            ]
            if changes:
                module = next((event.module for event in turn.events if event.kind == "setting"), None)
                return Finding(
                    f"not the same bits everywhere: {when} changes a setting of its process",
                    module,
                    None,
                    None,
                    f"it sets {', '.join(changes)}, in this process only, and kernels may give other bits "
                    "from here on",
                    "leave it out of the passes: threads is an option of samestep.init, check and train, and "
                    "the rest is to be set before the model is built, in every process",
                )
    return None


def _differ(when: When, num_workers: int) -> str:
    if num_workers == 1:
        return f"not the same bits: two runs of one worker differ first in {when}"
    return f"not the same bits: one worker and {num_workers} workers differ first in {when}"
