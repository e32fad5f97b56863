"""The likely cause of a difference, derived from what was recorded around it, and the remedy."""

from __future__ import annotations

from samestep.checking.recording import Difference, Event
from samestep.checking.surroundings import OPTIMIZER, Place

__all__ = ["cause_of"]

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
    place = _suspect(difference)
    if place is not None:
        return _held(difference, place, num_workers)
    if one is not None and two is not None and one.stream != two.stream:
        return (
            "the tower's random stream has moved: something outside the pass, such as another thread, draws "
            "from the global generators",
            "give code that runs outside the pass a generator of its own",
        )
    return _unknown(one, two)


def _own_stream(difference: Difference) -> tuple[str, str]:
    place = _suspect(difference, "random stream")
    named = "" if place is None else f" ({place})"
    return (
        f"it draws from a torch.Generator of its own{named}, which continues from tower to tower",
        "leave out generator=: the global generators are seeded for each step and tower",
    )


def _update(difference: Difference, num_workers: int) -> tuple[str, str]:
    event, place = difference.event, _suspect(difference)
    if event.stream:
        return (
            "the update draws from this process's global generator, which differs between workers outside "
            "the towers' passes",
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
    if place is not None:
        when = "from the start" if place in difference.as_built else "after the passes"
        which = f"{place} differs {when}{_values(difference, place, num_workers)}"
    return (
        f"the towers' average is the same and the update is not: {which}",
        "let the update depend only on the gradients and the step number",
    )


def _values(difference: Difference, place: Place, num_workers: int) -> str:
    """Describe the two values at a place, if both are short enough to print."""
    pair = difference.held[place]
    if {held.kind for held in pair if held is not None} != {"value"}:
        return ""
    labels = ("one worker", f"{num_workers} workers") if num_workers > 1 else ("one run", "the next")
    texts = ["not set" if held is None else held.value for held in pair]
    return f": it is {texts[0]} on {labels[0]} and {texts[1]} on {labels[1]}"


def _held(difference: Difference, place: Place, num_workers: int) -> tuple[str, str]:
    one, two = difference.held[place]
    kinds = {held.kind for held in (one, two) if held is not None}
    if place in difference.as_built:
        return (
            f"{place} differs from the start, and is neither a parameter nor a "
            f"buffer{_values(difference, place, num_workers)}",
            "draw it inside build(), seeded; or register it as a buffer: all workers start from worker 0's",
        )
    if "random stream" in kinds:
        return (
            f"{place} is a random generator of its own, which continues from tower to tower",
            "draw from the global generators of torch, random or np.random, which are seeded for each "
            "step and tower",
        )
    if kinds & {"tensor", "buffer"}:
        return (
            f"{place} is a tensor that carries over from one tower to the next in its process, and it is not "
            "averaged",
            f"{_PURE}: update it once a step, outside the towers, or let a normalisation layer keep it",
        )
    return (
        f"{place} is kept from tower to tower{_values(difference, place, num_workers)}",
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
        f"{_PURE}: look for what comes from the time, the process, or a random stream that is not global",
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


def _suspect(difference: Difference, kind: str = "") -> Place | None:
    """Return the place, among those with different values, that most likely caused the difference.

    A value that no pass has changed, such as the time of an import, counts only if the operator reads it.
    """
    module, as_built = difference.event.module, difference.as_built
    found = [
        (not _is_taken_in(difference, place), place in as_built, place.owner != module, number, place)
        for number, (place, pair) in enumerate(difference.held.items())
        if any(held is not None and kind in ("", held.kind) for held in pair)
    ]
    return min((each for each in found if not (each[0] and each[1])), default=[None])[-1]


def _is_taken_in(difference: Difference, place: Place) -> bool:
    """Whether a place is the optimizer's, has a generator, or is an input of the operator that differs."""
    one, two = difference.expected, difference.found
    was, now = difference.held[place]
    if place.owner == OPTIMIZER or "random stream" in (held.kind for held in (was, now) if held is not None):
        return True
    if one is None or two is None:
        return False
    if was is not None and now is not None and was.kind == "value":
        return was.value.removeprefix("-") in _numbers(one) and now.value.removeprefix("-") in _numbers(two)
    return str(place) in [name for name, _ in {*one.outside} ^ {*two.outside}]


def _numbers(event: Event) -> list[str]:
    return [number.removeprefix("-") for number in event.numbers.split(", ")]
