"""The calls of an `Elastic`, in a form that can be compared with other workers' calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "LoopStart", "Place", "call_of"]


@dataclass(frozen=True)
class Place:
    """A place in a program that makes a call.

    Attributes:
        line: the file's name and the line, such as "train.py:12".
        instruction: the position of the instruction in the bytecode, as a line may make several calls.
    """

    line: str
    instruction: int

    @classmethod
    def of_caller(cls) -> Place | None:
        """Return the place that called the caller of this function; None if Python does not tell."""
        frame = inspect.currentframe()
        for _ in range(2):
            frame = frame and frame.f_back
        if frame is None:
            return None
        return cls(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", frame.f_lasti)


@dataclass(frozen=True)
class Call:
    """A function, and the place that calls it.

    Attributes:
        name: the function's name.
        place: where it is called; None for what `Elastic` does by itself.
        arguments: the arguments as far as they can be compared. Calls with other arguments are equal, since
            most arguments change with each call.
    """

    name: str
    place: Place | None = None
    arguments: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.name}{self._where}"

    @property
    def with_arguments(self) -> str:
        """The call in words, with its arguments."""
        return f"{self.name}({', '.join(self.arguments)}){self._where}"

    @property
    def _where(self) -> str:
        return "" if self.place is None else f" in {self.place.line}"

    def is_same(self, other: Call) -> bool:
        """Whether the arguments are equal, too, as far as they can be compared."""
        return self == other and self.arguments == other.arguments


def call_of(
    work: Callable[..., Any], place: Place | None, arguments: Iterable[Any], state: Mapping[str, Any]
) -> Call:
    """Return the call of `work` at `place`; arguments that are objects in `state` are shown by name."""
    names = {id(value): name for name, value in state.items()}
    function: Any = work
    while isinstance(function, functools.partial):
        arguments = (*function.args, *function.keywords.values(), *arguments)
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Call(name, place, tuple(_shown(each, names) for each in arguments))


def _shown(value: Any, names: Mapping[int, str]) -> str:
    """Return the value of a plain argument, the name of an object in the state, otherwise the type."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return names.get(id(value), type(value).__name__)


class LoopStart:
    """The first call in the loop's body, with which newcomers start: the first that was made a second time.

    A program may have several loops: another call takes its place if it is made twice in the meantime. The
    body may begin with a call that is not always made: `refuse` tells what newcomers really start with.

    Attributes:
        call: that call; None until one has been made twice.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self._num_made = 0
        self._since: set[Call] = set()  # calls since `call` was last made
        self._refused: set[Call] = set()

    def note(self, call: Call, number: int) -> None:
        """Take note of the call with this number; a call that is repeated has the same number."""
        if number < self._num_made:
            return
        self._num_made = number + 1
        if call in self._since and call not in self._refused:
            self.call = call
        if call == self.call:
            self._since.clear()
        else:
            self._since.add(call)

    def refuse(self, call: Call, first: Call) -> None:
        """Take note that newcomers started with `first` when they were to start with `call`."""
        self._refused.add(call)
        if first not in self._refused:
            self.call = first
