"""The values of variables, attributes and entries while code is visited: what they are computed from."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from torch import nn

from samestep.watching.program.code_values import PLAIN, UNKNOWN, NewObject, Place, Value, is_registry, join

__all__ = ["ENTRIES", "PlaceValues", "numbered"]

T = TypeVar("T")

ENTRIES = "[]"
"""The name of the place for all entries of a container that have no constant name."""

_MOST_OBJECTS = 8
_NOWHERE = frozenset[Place]()


class PlaceValues:
    """The values of places in a turn, where those that were not set have the values from before it.

    Attributes:
        deciding: what it depends on whether the current statement runs.
    """

    deciding: frozenset[Place] = _NOWHERE

    def __init__(self) -> None:
        self._values: dict[Place, Value] = {}
        self._names: dict[Place, str] = {}
        self._objects: dict[Place, Any] = {}  # what they were before the turn
        self._places: dict[Hashable, set[Place]] = defaultdict(set)  # that were set, by holder
        self._changed: set[Place] = set()  # that may have been set, except caches that were filled
        self._emptied: set[Place] = set()  # of containers that were empty before the turn, too
        self._filled: frozenset[Place] = _NOWHERE  # caches that the current branch fills
        self._same: set[Hashable] = set()  # places, and holders of places, from which nothing is computed
        self._kept: list[Any] = []

    def keep(self, found: T) -> T:
        """Keep an object, so that no other one gets its id; return it."""
        self._kept.append(found)
        return found

    def get(self, place: Place) -> Value | None:
        """Return the value of a place that was set; None for others."""
        return self._values.get(place)

    def read(self, value: Value) -> Value:
        """Return the value from before the turn, and note its name and object."""
        for place in value.sources:
            self._names.setdefault(place, value.name)
            self._objects.setdefault(place, value.object)
        return value

    def object_before(self, place: Place) -> Any:
        """Return what a place was before the turn, if that is known and was read."""
        return self._objects.get(place, UNKNOWN)

    def keep_same(self, value: Value, place: Place) -> Value:
        """Return a value from before the turn that is the same in all passes."""
        self._same.add(place)
        return value._replace(sources=_NOWHERE)

    def put(self, place: Place, value: Value, name: str) -> None:
        """Set the value of a place; `name` is as in errors."""
        self._values[place] = value.computed_from(self.deciding)
        self._names[place] = name
        self._places[place.holder].add(place)
        self._emptied -= {place, Place(place.holder, ENTRIES)}
        if place not in self._filled or not value.sources.isdisjoint(self._filled):
            self._changed.add(place)

    def is_changed(self, place: Place) -> bool:
        """Say whether the turn sets a place; not if that fills a cache."""
        return place in self._changed

    def names_of_changed(self, places: frozenset[Place]) -> set[str]:
        """Return the names of those of these places that the turn sets."""
        changed = places & self._changed
        return {self._names[place] for place in changed if not self._is_as_before(place)}

    def _is_as_before(self, place: Place) -> bool:
        """Say whether a container is empty again after the turn, in any case."""
        return place in self._emptied and not self._values[place].sources

    def names_of_computed(self, places: frozenset[Place], source: Place) -> set[str]:
        """Return the names of those of these places that the turn may set to what `source` is part of."""
        held = {place: self._values[place] for place in places if place in self._values}
        return {self._names[place] for place, value in held.items() if source in value.sources}

    # ---- containers ----------------------------------------------------------------------------------

    def data_of(self, value: Value) -> frozenset[Place]:
        """Return what a value is computed from, with a container's entries."""
        if value.key is None or not (value.is_container or self.is_filled(value)):
            return value.sources
        held = (self._values[place].sources for place in self._places[value.key] if place in self._values)
        return value.sources.union(self._entries(value).sources, *held)

    def all_in(self, holder: Value) -> frozenset[Place]:
        """Return what an object is computed from, with its attributes that the code has set."""
        places = () if holder.key is None else self._places[holder.key]
        held = (self._values[place] for place in places if place in self._values)
        return self.data_of(holder).union(*map(self.data_of, held))

    def named_in(self, holder: Value) -> dict[str, Value]:
        """Return the entries, or attributes, with constant names of an object that the code has made."""
        places = self._places[holder.key] if isinstance(holder.object, NewObject) else ()
        names = {place.name: place for place in places if place.name != ENTRIES}
        return {name: self._values[place] for name, place in names.items() if place in self._values}

    def unnamed_in(self, holder: Value) -> frozenset[Place]:
        """Return what other entries are computed from."""
        return holder.sources | (self._entries(holder).sources if holder.is_container else _NOWHERE)

    def is_filled(self, holder: Value) -> bool:
        """Say whether a call has changed what an object holds."""
        return Place(holder.key, ENTRIES) in self._values

    def fill(self, holder: Value, sources: frozenset[Place], *, is_change: bool) -> None:
        """Add to what an object holds; no change if that is a cache."""
        if holder.key is None:
            return
        place = Place(holder.key, ENTRIES)
        self._values[place] = self._entries(holder).computed_from(sources)
        self._names[place] = holder.name
        self._places[holder.key].add(place)
        self._emptied.discard(place)
        if is_change:
            self._changed.add(place)

    def set_last(self, holder: Value, value: Value) -> None:
        """Note what was appended last."""
        if holder.key is not None:
            self._values[Place(holder.key, numbered(-1))] = value

    def last(self, holder: Value) -> Value | None:
        """Return what the turn has appended or set last; None if nothing."""
        return self._values.get(Place(holder.key, numbered(-1)))

    def read_entry(self, place: Place, holder: Value) -> Value:
        """Return the value of an entry with a constant number; entries may have moved before the turn."""
        known = self._values.get(place)
        if known is not None:
            return known.computed_from((self.get(Place(holder.key, ENTRIES)) or Value()).sources)
        is_from_before = Place(holder.key, ENTRIES) in self._entries(holder).sources
        before = frozenset({place}) if is_from_before else _NOWHERE
        return self.read(Value(self.data_of(holder) | before, name=holder.name))

    def empty(self, holder: Value) -> None:
        """Let go of all entries."""
        places = () if holder.key is None else (Place(holder.key, ENTRIES), *self._places[holder.key])
        for place in places:
            self._values[place] = Value(self.deciding)
        if isinstance(holder.object, (list, dict, set, deque)) and not holder.object:
            self._emptied.update(places)

    def objects_in(self, holder: Value) -> list[Value]:
        """Return the objects in a container that is known, if they are a few, and no numbers."""
        held = holder.object.values() if isinstance(holder.object, dict) else holder.object
        held = held.parts if isinstance(held, NewObject) else held
        if isinstance(held, (nn.Sequential, nn.ModuleList)):
            held = list(islice(held, _MOST_OBJECTS))
        if not isinstance(held, (list, tuple, deque, ValuesView)) or len(held) > _MOST_OBJECTS:
            return []
        found = [each if isinstance(each, Value) else Value.of(each, holder.name) for each in held]
        if any(each.key is None or isinstance(each.object, PLAIN) for each in found):
            return []
        entries = self.data_of(holder)
        return [each.computed_from(entries) for each in found]

    def _entries(self, holder: Value) -> Value:
        place = Place(holder.key, ENTRIES)
        if place in self._values:
            return self._values[place]
        self._names.setdefault(place, holder.name)
        if is_registry(holder.object):
            self._same.add(holder.key)
        return Value() if self._is_same(place) else Value(frozenset({place}))

    # ---- branches ------------------------------------------------------------------------------------

    @contextmanager
    def decided_by(self, sources: frozenset[Place]) -> Iterator[None]:
        """Run statements that run only for some values of `sources`."""
        outer, self.deciding = self.deciding, self.deciding | sources
        yield
        self.deciding = outer

    def branch(
        self,
        branches: Sequence[Callable[[], None]],
        deciding: frozenset[Place] = _NOWHERE,
        filled: frozenset[Place] = _NOWHERE,
    ) -> None:
        """Visit statements of which only one sequence runs.

        Args:
            branches: they visit one sequence each.
            deciding: what decides which one runs.
            filled: what has no value yet, or that of something else, where the first one runs.
        """
        before, after, outer = self._values, [], self._filled
        self._filled = outer | filled
        with self.decided_by(deciding):
            for visit in branches:
                self._values = dict(before)
                visit()
                after.append(self._values)
                self._filled = outer
        self._values = before
        changed = {
            place for values in after for place, value in values.items() if before.get(place) is not value
        }
        for place in changed:
            first, *others = (values.get(place) for values in after)
            if first is None or any(each is not first for each in others):
                first = join(self._before(place) if each is None else each for each in (first, *others))
            self._values[place] = first

    def _before(self, place: Place) -> Value:
        """Return what a place was before the turn."""
        return Value() if self._is_same(place) else Value(frozenset({place}), key=place)

    def _is_same(self, place: Place) -> bool:
        return place.is_new or not self._same.isdisjoint((place, place.holder))


def numbered(number: int) -> str:
    """Return the name of the place for the entry of a container with a constant number."""
    return f"[{number}]"
