"""The likely cause of a difference, derived from what was recorded around it, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.checking.recording import Difference, Event
from samestep.checking.surroundings import OPTIMIZER, Place

__all__ = ["cause_of"]

_MAX_SUSPECTS = 3
_PURE = "a tower may depend only on its rows, the weights and the global random generators"


def cause_of(difference: Difference, num_workers: int) -> tuple[str, str]:
    """Return the cause and the remedy of a difference between one worker and `num_workers`."""
    event = difference.event
    one, two = difference.expected, difference.found
    if difference.when.part == "build":
        return (
            "build() makes different weights each time",
            "seed inside build(), such as with torch.manual_seed(0), and draw from no unseeded generator",
        )
    if event.kind == "rows":
        return (
            "the rows that the tower is given are not the same",
            "let an example depend only on its index and torch's, random's and np.random's global generators",
        )
    if event.stream == "own":
        return _own_stream(difference)
    if difference.when.part == "update":
        return _update(difference, num_workers)
    if _is_kernel(one, two):
        return (
            "same inputs, different values: its kernel is not deterministic (on a GPU, mostly atomic "
            "additions)",
            "use torch.use_deterministic_algorithms(True), or an operator that has a deterministic kernel",
        )
    if one is not None and two is not None and one.name == two.name and one.stream != two.stream:
        return _moved_stream(difference)
    suspects = _suspects(difference)
    return _held(difference, suspects, num_workers) if suspects else _unknown(one, two)


def _moved_stream(difference: Difference) -> tuple[str, str]:
    if difference.is_reseeded:
        return (
            "the pass itself seeds torch's global generator, and not alike in each run",
            "leave out torch.manual_seed and torch.seed: samestep seeds the global generators for each step "
            "and tower",
        )
    return (
        "the tower's random stream has moved: something outside the pass, such as another thread, draws from "
        "the global generators",
        "give code that runs outside the pass a generator of its own",
    )


def _own_stream(difference: Difference) -> tuple[str, str]:
    suspects = _suspects(difference, "random stream")
    named = f" ({_either(suspects)})" if suspects else ""
    return (
        f"it draws from a torch.Generator of its own{named}, which continues from tower to tower",
        "leave out generator=: the global generators are seeded for each step and tower",
    )


def _update(difference: Difference, num_workers: int) -> tuple[str, str]:
    event, suspects = difference.event, _suspects(difference)
    is_read = any(_is_read(difference, place) for place in suspects)
    if event.stream or (event.kind == "operator" and difference.drew and not is_read):
        return (
            f"the update draws from this process's global generator{_of(difference.drew)}, which differs "
            "between workers outside the towers' passes",
            "draw in the loss function, or from samestep.streams.generator(seed, purpose, step)",
        )
    if event.kind == "average":
        return (
            "towers' gradients are the same and their average is not",
            "this is a fault of samestep: please report it with this model",
        )
    which = "state of the optimizer or schedule"
    one, two = difference.expected, difference.found
    if one is None or two is None or one.name != two.name:
        which = _other_operators(one, two)
    if event.kind == "weight" and event.module and suspects:  # a buffer, which the passes change
        return _held(difference, suspects, num_workers)
    if suspects:
        when = "from the start" if suspects[0] in difference.as_built else "after the passes"
        which = f"{suspects[0]} differs {when}{_values(difference, suspects, num_workers)}"
    return (
        f"the towers' average is the same and the update is not: {which}",
        "let the update depend only on the gradients and the step number",
    )


def _of(generators: Sequence[str]) -> str:
    return f" of {' and '.join(generators)}" if generators else ""


def _either(places: Sequence[Place]) -> str:
    more = len(places) - _MAX_SUSPECTS
    names = [*map(str, places[:_MAX_SUSPECTS]), *([f"{more} more"] if more > 0 else [])]
    return " or ".join(names)


def _values(difference: Difference, suspects: Sequence[Place], num_workers: int) -> str:
    """Describe the two values at the first place, if both are short enough to print, and name the others."""
    pair = difference.held[suspects[0]]
    others = f" (or the cause is {_either(suspects[1:])})" if suspects[1:] else ""
    if {held.kind for held in pair if held is not None} != {"value"}:
        return others
    labels = ("one worker", f"{num_workers} workers") if num_workers > 1 else ("one run", "the next")
    texts = ["not set" if held is None else held.value for held in pair]
    return f": it is {texts[0]} on {labels[0]} and {texts[1]} on {labels[1]}{others}"


def _held(difference: Difference, suspects: Sequence[Place], num_workers: int) -> tuple[str, str]:
    place, values = suspects[0], _values(difference, suspects, num_workers)
    one, two = difference.held[place]
    kinds = {held.kind for held in (one, two) if held is not None}
    if place in difference.as_built:
        return (
            f"{place} differs from the start, and is neither a parameter nor a buffer{values}",
            "draw it inside build(), seeded; or register it as a buffer: all workers start from worker 0's",
        )
    if "random stream" in kinds:
        return (
            f"{place} is a random generator of its own, which continues from tower to tower{values}",
            "draw from the global generators of torch, random or np.random, which are seeded for each "
            "step and tower",
        )
    if kinds & {"tensor", "buffer"}:
        return (
            f"{place} is a tensor that carries over from one tower to the next in its process, and it is not "
            f"averaged{values}",
            f"{_PURE}: update it once a step, outside the towers, or let a normalisation layer keep it",
        )
    return (
        f"{place} is kept from tower to tower{values}",
        f"{_PURE}: set it once a step, outside the towers, or leave it out of the forward pass",
    )


def _unknown(one: Event | None, two: Event | None) -> tuple[str, str]:
    if one is None or two is None or one.name != two.name:
        return (
            _other_operators(one, two),
            f"{_PURE}: look for what the code branches on, and for an order that is not fixed, as a set's",
        )
    if one.kind != "operator":
        return (
            "no watched operator gave different values: a custom backward, or code that cannot be watched",
            f"{_PURE}",
        )
    if one.numbers != two.numbers:
        what = f"its Python numbers differ: {one.numbers} and {two.numbers}"
    else:
        named = [name for (name, _) in set(one.outside) ^ set(two.outside) if name]
        tensor = named[0] if named else "a tensor that no operator of the pass made"
        what = f"its input differs: {tensor}"
    return (
        what,
        f"{_PURE}: look for what comes from the time, the process, or a random stream that is not global "
        "or that the pass seeds",
    )


def _other_operators(one: Event | None, two: Event | None) -> str:
    names = [event.name if event and event.kind == "operator" else "nothing" for event in (one, two)]
    return f"different operators run: {names[0]} in one, {names[1]} in the other"


def _is_kernel(one: Event | None, two: Event | None) -> bool:
    """Whether the same operator had the same inputs and random stream, but gave other values."""
    if one is None or two is None or one.kind != "operator" or one.wrote:
        return False
    inputs = [(event.name, event.numbers, event.outside, event.stream) for event in (one, two)]
    return inputs[0] == inputs[1] and one.values != two.values


def _suspects(difference: Difference, kind: str = "") -> list[Place]:
    """Return the places with different values that may have caused the difference, the most likely first.

    If the operator reads any of them, only those count. A value that no pass has changed, such as the time of
    an import, counts only if the operator reads it.
    """
    places = [
        place
        for place, pair in difference.held.items()
        if any(held is not None and kind in ("", held.kind) for held in pair)
    ]
    read = [place for place in places if _is_read(difference, place)]
    if read:
        return sorted(read, key=lambda place: place in difference.as_built)
    likely = {place for place in places if _is_likely(difference, place)}
    possible = [place for place in places if place in likely or place not in difference.as_built]
    module = difference.event.module
    return sorted(
        possible, key=lambda place: (place not in likely, place in difference.as_built, place.owner != module)
    )


def _is_likely(difference: Difference, place: Place) -> bool:
    """Whether a place is the optimizer's or has a generator."""
    kinds = {held.kind for held in difference.held[place] if held is not None}
    return place.owner == OPTIMIZER or "random stream" in kinds


def _is_read(difference: Difference, place: Place) -> bool:
    """Whether the operator that differs reads a place, as it is before or after the turn."""
    one, two = difference.expected, difference.found
    if one is None or two is None:
        return False
    pairs = zip(_numbers(one), _numbers(two), strict=False)
    numbers = {pair for pair in pairs if pair[0] != pair[1]}
    values = [difference.held[place], difference.held_after.get(place, (None, None))]
    if any(tuple(held.value.removeprefix("-") for held in pair if held) in numbers for pair in values):
        return True
    return str(place) in [name for name, _ in {*one.outside} ^ {*two.outside}]


def _numbers(event: Event) -> list[str]:
    return [number.removeprefix("-") for number in event.numbers.split(", ")]
