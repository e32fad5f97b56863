"""What a few steps did, as digests in the order of execution, and where two recordings part."""

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
    """A part of a step: "tower 3", or "update" after it; "build" before all, or "error" after all."""

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
    values: str  # digest of what came out
    module: str = ""  # where it happened, by path and class
    phase: str = ""  # "forward", "backward" or "update"
    numbers: str = ""  # the operator's arguments other than tensors
    outside: tuple[
        tuple[str, str], ...
    ] = ()  # tensors from outside this turn that it took in: (name, digest)
    stream: str = ""  # what an operator drew random numbers from: "own", or the state of the global one
    wrote: tuple[str, ...] = ()  # outside tensors that it wrote to


@dataclass
class Turn:
    """All that happened in one part of a step."""

    when: When
    built: Mapping[Place, Held]  # what the model held when it was built; shared by all turns
    changed: Mapping[Place, Held] = field(default_factory=dict)  # what of it was different before this turn
    weights: Mapping[str, str] = field(default_factory=dict)  # digests of the parameters before this turn
    written: Mapping[str, str] = field(default_factory=dict)  # parameters that a pass wrote to, their modules
    events: list[Event] = field(default_factory=list)  # in order
    settings: Mapping[str, str] = field(default_factory=dict)  # of the process at its end; {} if it failed
    num_compiled: int = 0  # how many graphs torch.compile made in it

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
        """What turns have changed of what was built."""
        return {place for turn in self.turns.values() for place in turn.changed}

    @property
    def has_moved(self) -> bool:
        """Whether any weight has changed."""
        ends = [{e.name: e.values for e in turn.events if e.kind == "weight"} for turn in self.turns.values()]
        return not self.turns or ends[0] != ends[-1]


@dataclass(frozen=True)
class Difference:
    """The first event that is not the same."""

    when: When
    expected: Event | None  # what the reference has there; None where it has nothing any more
    found: Event | None  # what the other placement has
    held: Mapping[Place, tuple[Held | None, Held | None]]  # before the turn, where it differs
    as_built: frozenset[Place]  # what of that no turn has changed, so that it differed from the start
    parameter: str | None  # the first with another gradient, average or value in the same turn

    @property
    def event(self) -> Event:
        """One of the two: the operator, if only one is."""
        events = [event for event in (self.expected, self.found) if event is not None]
        return next((event for event in events if event.kind == "operator"), events[0])


def first_difference(
    reference: Recording, workers: Sequence[Recording], changed: Collection[Place] = ()
) -> Difference | None:
    """Walk the reference, a recording of one worker, and return where one of `workers` parts from it.

    Turns with the same results are the same: some operators return memory that is never read. A turn that an
    error ended is not compared. `changed` is what turns are known to change, from other recordings.
    """
    for when, turn in reference.turns.items():
        for other in [worker.turns[when] for worker in workers if when in worker.turns]:
            if turn.settings and other.settings and other.results != turn.results:
                passing = {place for each in (reference, *workers) for place in each.changed}
                return _difference(when, turn, other, passing.union(changed))
    return None


def compiled_again(recording: Recording) -> When | None:
    """Return the first turn after the first tower's in which torch.compile made another graph."""
    turns = [when for when, turn in recording.turns.items() if when.is_tower and turn.num_compiled]
    return next((when for when in turns if when != When(0, "tower 0")), None)


def held_differences(reference: Recording, workers: Sequence[Recording]) -> Iterator[Place]:
    """Yield what the model held at the start of the same turn with different values."""
    for when, turn in reference.turns.items():
        for worker in workers:
            if when in worker.turns:
                yield from _held_differences(turn, worker.turns[when])


def _difference(when: When, turn: Turn, other: Turn, passing: set[Place]) -> Difference:
    pairs = zip_longest(turn.events, other.events)
    expected, found = next((one, two) for one, two in pairs if one != two)
    held = _held_differences(turn, other)
    return Difference(
        when, expected, found, held, frozenset(held.keys() - passing), _first_parameter(turn, other)
    )


def _held_differences(turn: Turn, other: Turn) -> dict[Place, tuple[Held | None, Held | None]]:
    one, two = turn.held, other.held
    return {
        place: (one.get(place), two.get(place))
        for place in dict.fromkeys([*one, *two])
        if one.get(place) != two.get(place)
    }


def _first_parameter(turn: Turn, other: Turn) -> str | None:
    """Compare by name, because operators that differ shift what comes after them."""
    one, two = (
        {
            (event.kind, event.name): event.values
            for event in each.results
            if event.kind not in ("rows", "loss")
        }
        for each in (turn, other)
    )
    return next((name for (kind, name), values in one.items() if two.get((kind, name)) != values), None)
