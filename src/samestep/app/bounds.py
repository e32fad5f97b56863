"""The values that an option's type allows: on the command line, in settings.json and in Python."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "LearningRate",
    "LoaderProcesses",
    "NumWorkers",
    "Range",
    "Threads",
    "alternatives",
    "describe",
    "fits",
    "from_json",
    "from_word",
    "kinds_of",
]

_FROM_WORD: dict[Any, Callable[[str], object]] = {bool: {"true": True, "false": False}.__getitem__}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}


@dataclass(frozen=True)
class Range:
    """The bounds of a number, as in `Annotated[int, Range(1, 9)]`. No range contains NaN.

    Attributes:
        low: the lowest allowed value.
        high: the highest allowed value.
        is_open: whether `low` itself is excluded.
    """

    low: float
    high: float
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return (
            f"above {self.low} and up to {self.high}" if self.is_open else f"from {self.low} to {self.high}"
        )


Count = Annotated[int, Range(1, 10**12)]
"""A positive count, or a period in steps."""
Threads = Annotated[int, Range(1, 1024)]
"""CPU threads. The limit is above any machine's number of cores; far more threads crash a process."""
NumWorkers = Annotated[int, Range(1, 1024)] | Literal["auto"]
"""Worker processes on one machine."""
LoaderProcesses = Annotated[int, Range(0, 256)]
"""Processes with which each worker reads its data."""
LearningRate = Annotated[float, Range(0, 10**6, is_open=True)]


@cache
def kinds_of(settings: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; a field redeclared without bounds keeps those of its base."""
    kinds = get_type_hints(settings, include_extras=True)
    for base in filter(is_dataclass, settings.__mro__[1:]):
        plain, bounded = get_type_hints(base), get_type_hints(base, include_extras=True)
        kinds |= {name: bounded[name] for name, kind in plain.items() if kinds[name] == kind}
    return {field.name: kinds[field.name] for field in fields(settings)}


def alternatives(kind: Any) -> list[tuple[Any, Range | None]]:
    """Return the members of a type such as `Annotated[int, Range(1, 9)] | None`, each with its bounds."""
    if get_origin(kind) in (Union, types.UnionType):
        return [one for part in get_args(kind) for one in alternatives(part)]
    return [get_args(kind)[:2]] if get_origin(kind) is Annotated else [(kind, None)]


def describe(kind: Any) -> str:
    """Return a description of the allowed values, such as "an integer from 1 to 9 or auto"."""
    return " or ".join(_describe(*one) for one in alternatives(kind) if one[0] is not type(None))


def _describe(kind: Any, bounds: Range | None) -> str:
    if get_origin(kind) is Literal:
        names = get_args(kind)
        return f"one of {', '.join(names)}" if len(names) > 1 else str(names[0])
    return _NAMES[kind] + (f" {bounds}" if bounds is not None else "")


def fits(kind: Any, value: object) -> bool:
    """Return whether a field of this type may have the value."""
    return any(_fits(*one, value) for one in alternatives(kind))


def _fits(kind: Any, bounds: Range | None, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if kind is Path:
        return isinstance(value, Path) and _is_file_name(str(value))
    if kind is float and type(value) in (int, float):
        return value in bounds if bounds is not None else math.isfinite(value)
    return type(value) is kind and (bounds is None or value in bounds)


def _is_file_name(text: str) -> bool:
    with suppress(UnicodeEncodeError):  # a lone surrogate, which JSON can hold
        return bool(text) and "\0" not in text and bool(os.fsencode(text))
    return False


def from_word(kind: Any, word: str) -> object:
    """Convert an argument of the command line to the type.

    Raises:
        ValueError: the type does not allow the value; the message says what is expected.
    """
    for one, bounds in alternatives(kind):
        with suppress(ValueError, TypeError, KeyError):
            value = word if get_origin(one) is Literal else _FROM_WORD.get(one, one)(word)
            if word and _fits(one, bounds, value):  # Path("") is the current folder
                return value
    raise ValueError(f"expected {describe(kind)}")


def from_json(kind: Any, value: object) -> object:
    """Convert a JSON value to the type.

    Raises:
        ValueError: the type does not allow the value; the message says what is expected.
    """
    is_path = any(one is Path for one, _ in alternatives(kind))
    if is_path and isinstance(value, str):
        return from_word(kind, value)
    if not fits(kind, value):
        raise ValueError(f"expected {describe(kind)}")
    return value
