"""What a few steps did, as digests in order of execution, and where two recordings first differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from samestep.checking.attributes import Held
from samestep.checking.surroundings import Place
from samestep.errors import Error

__all__ = [
    "Difference",
    "Event",
    "Recording",
    "Turn",
    "When",
    "compiled_again",
    "first_difference",
    "held_differences",
]


class When(NamedTuple):
    """A part of a step: "tower 3" or "update"; "build" comes before all steps, "error" after all."""

    step: int
    part: str

    @property
    def is_tower(self) -> bool:
        """Whether it is a tower's pass."""
        return self.part.startswith("tower")

    def __str__(self) -> str:
        return "build()" if self.part == "build" else f"step {self.step}, {self.part}"


@dataclass(frozen=True)
class Event:
    """One result that must be the same in every placement."""

    kind: Literal["rows", "operator", "setting", "loss", "gradient", "average", "weight"]
    name: str  # of the operator or the tensor
    values: str  # digest of the result
    module: str = ""  # where it happened, by path and class
    phase: str = ""  # "forward", "backward" or "update"
    numbers: str = ""  # the operator's arguments other than tensors
    outside: tuple[tuple[str, str], ...] = ()  # (name, digest) of its inputs from outside this turn
    stream: str = ""  # where an operator drew from: "own" generator, or a digest of the global ones' state
    wrote: tuple[str, ...] = ()  # outside tensors that it wrote to


@dataclass
class Turn:
    """All events in one part of a step."""

    when: When
    built: Mapping[Place, Held]  # what the model held when it was built; shared by all turns
    changed: Mapping[Place, Held] = field(default_factory=dict)  # what of it had changed before this turn
    weights: Mapping[str, str] = field(default_factory=dict)  # digests of the parameters before this turn
    written: Mapping[str, str] = field(default_factory=dict)  # modules of the parameters that it wrote to
    events: list[Event] = field(default_factory=list)  # in order
    settings: Mapping[str, str] = field(default_factory=dict)  # of the process at its end; {} if it failed
    num_compiled: int = 0  # how many graphs torch.compile made in this turn
    drew: tuple[str, ...] = ()  # which global generators besides torch's it has drawn from or seeded
    is_reseeded: bool = False  # whether it has seeded torch's global generator

    @property
    def results(self) -> list[Event]:
        """The events other than operators."""
        return [event for event in self.events if event.kind not in ("operator", "setting")]

    @property
    def held(self) -> dict[Place, Held]:
        """What the model held before this turn."""
        return {**self.built, **self.changed}


@dataclass
class Recording:
    """The turns of one worker, in the order of execution."""

    settings: Mapping[str, str]  # of the process, before the first step
    turns: dict[When, Turn] = field(default_factory=dict)
    digest: str = ""  # of the weights, after the last step
    unaveraged: Sequence[str] = ()  # what the optimizer updates by gradients that are not averaged
    error: Error | None = None  # what ended the steps early

    @property
    def changed(self) -> set[Place]:
        """The places whose values any turn has changed."""
        return {place for turn in self.turns.values() for place in turn.changed}

    def after(self, when: When) -> Turn:
        """Return the turn after this one, or this one if it is the last."""
        turns = list(self.turns)
        return self.turns[turns[min(turns.index(when) + 1, len(turns) - 1)]]

    @property
    def has_moved(self) -> bool:
        """Whether any weight has changed."""
        ends = [{e.name: e.values for e in turn.events if e.kind == "weight"} for turn in self.turns.values()]
        return not self.turns or ends[0] != ends[-1]


_Differences = Mapping[Place, tuple[Held | None, Held | None]]  # both values, where they differ


@dataclass(frozen=True)
class Difference:
    """The first event that is not the same."""

    when: When
    expected: Event | None  # in the reference; None if its turn has ended there
    found: Event | None  # in the other placement; None if its turn has ended there
    held: _Differences  # before the turn
    held_after: _Differences
    as_built: frozenset[Place]  # those of `held` that differed from the start: no turn has changed them
    parameter: str | None  # the first with a different gradient, average or value in the same turn
    drew: tuple[str, ...] = ()  # which global generators besides torch's the turn has drawn from
    is_reseeded: bool = False  # whether the turn has seeded torch's global generator

    @property
    def event(self) -> Event:
        """One of the two events: an operator, if there is one."""
        events = [event for event in (self.expected, self.found) if event is not None]
        return next((event for event in events if event.kind == "operator"), events[0])


def first_difference(
    reference: Recording, workers: Sequence[Recording], changed: Collection[Place] = ()
) -> Difference | None:
    """Return the first event in which one of `workers` differs from the reference, a recording of one worker.

    Turns with the same results are equal, whatever their operators returned: some return memory that is never
    read. A turn that an error ended is not compared. `changed` are places that other recordings have changed.
    """
    for when, turn in reference.turns.items():
        for worker in [worker for worker in workers if when in worker.turns]:
            other = worker.turns[when]
            if turn.settings and other.settings and other.results != turn.results:
                passing = {place for each in (reference, *workers) for place in each.changed}
                after = _held_differences(reference.after(when), worker.after(when))
                return _difference(turn, other, after, passing.union(changed))
    return None


def compiled_again(recording: Recording) -> When | None:
    """Return the first turn after the first tower's in which torch.compile made another graph."""
    turns = [when for when, turn in recording.turns.items() if when.is_tower and turn.num_compiled]
    return next((when for when in turns if when != When(0, "tower 0")), None)


def held_differences(reference: Recording, workers: Sequence[Recording]) -> Iterator[Place]:
    """Yield the places whose values differ at the start of the same turn."""
    for when, turn in reference.turns.items():
        for worker in workers:
            if when in worker.turns:
                yield from _held_differences(turn, worker.turns[when])


def _difference(turn: Turn, other: Turn, after: _Differences, passing: set[Place]) -> Difference:
    pairs = zip_longest(turn.events, other.events)
    expected, found = next((one, two) for one, two in pairs if one != two)
    held = _held_differences(turn, other)
    as_built = frozenset(held.keys() - passing)
    parameter = _first_parameter(turn, other)
    return Difference(
        turn.when, expected, found, held, after, as_built, parameter, turn.drew, turn.is_reseeded
    )


def _held_differences(turn: Turn, other: Turn) -> _Differences:
    one, two = turn.held, other.held
    return {
        place: (one.get(place), two.get(place))
        for place in dict.fromkeys([*one, *two])
        if one.get(place) != two.get(place)
    }


def _first_parameter(turn: Turn, other: Turn) -> str | None:
    """Return the first parameter that differs; by name, because different operators shift later events."""
    one, two = (
        {
            (event.kind, event.name): event.values
            for event in each.results
            if event.kind not in ("rows", "loss")
        }
        for each in (turn, other)
    )
    return next((name for (kind, name), values in one.items() if two.get((kind, name)) != values), None)
