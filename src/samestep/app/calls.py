"""The calls of an `Elastic`, in a form that can be compared with other workers' calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from samestep.batches.batch import LocalBatch
from samestep.batches.columns import Whole
from samestep.batches.fingerprint import fingerprint

__all__ = ["Call", "LoopStart", "Place", "call_of", "with_values"]

K = TypeVar("K")


@dataclass(frozen=True)
class Place:
    """A place in a program that makes a call.

    Attributes:
        line: the file's name and the line, such as "train.py:12".
        columns: where the call's text begins and ends, as a line may make several calls. Instructions do not
            tell: Python compiles the condition of a `while` twice.
    """

    line: str
    columns: tuple[int | None, ...] = ()

    @classmethod
    def of_caller(cls) -> Place | None:
        """Return the place that called the caller of this function; None if Python does not tell."""
        frame = inspect.currentframe()
        for _ in range(2):
            frame = frame and frame.f_back
        if frame is None:
            return None
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return cls(line, _positions(frame.f_code)[frame.f_lasti // 2])


@functools.cache
def _positions(code: CodeType) -> Sequence[tuple[int | None, ...]]:
    """Return the place of each instruction in the source: lines and columns."""
    return list(code.co_positions())


@dataclass(frozen=True)
class Call:
    """A function, and the place that calls it.

    Attributes:
        name: the function's name.
        place: where it is called; None for what `Elastic` does by itself. It may depend on the worker, as in
            `if job.is_first: print(elastic(evaluate))`, with another call in `else`.
        arguments: the arguments as far as they can be compared. Calls with other arguments are equal, since
            most arguments change with each call.
    """

    name: str
    place: Place | None = None
    arguments: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        where = "" if self.place is None else f" in {self.place.line}"
        return f"{self.name}({', '.join(self.arguments)}){where}"

    def can_be(self, first: Call, others: Collection[Call]) -> bool:
        """Return whether a newcomer's first call is this one; `others` are calls of other times."""
        return (first.name, first.arguments) == (self.name, self.arguments) and first not in others


def call_of(work: Callable[..., Any], place: Place | None, names: Mapping[int, str]) -> Call:
    """Return the call of `work` at `place`; `names` has the names of some objects, by their id."""
    function, arguments = _taken_apart(work)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Call(name, place, tuple(_shown(each, names) for each in arguments))


def with_values(call: Call, work: Callable[..., Any], optimizers: Iterable[Optimizer]) -> Call:
    """Return a call with more to compare: the tensors in the arguments of `work`, and learning rates."""
    _, arguments = _taken_apart(work)
    held = [tensor for each in arguments for tensor in _tensors(each)]
    shown = [f"tensors {fingerprint(Whole(held)):08x}"] if held else []
    rates = [group["lr"] for each in optimizers for group in each.param_groups if "lr" in group]
    return replace(call, arguments=(*call.arguments, *shown, *(f"lr={float(rate)}" for rate in rates)))


def _taken_apart(work: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """Return the function behind `functools.partial`, and all arguments."""
    arguments: list[Any] = []
    while isinstance(work, functools.partial):
        arguments = [*work.args, *work.keywords.values(), *arguments]
        work = work.func
    if isinstance(work, FunctionType) and work.__name__ == "<lambda>":
        arguments += _held(work)
    return work, arguments


def _held(function: FunctionType) -> list[Any]:
    """Return what a lambda takes from around it: `k` in `lambda: step(k)` and in `lambda k=k: step(k)`."""
    cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # an empty one raises
    return [*(function.__defaults__ or ()), *(cell.cell_contents for cell in cells)]


def _shown(value: Any, names: Mapping[int, str]) -> str:
    """Return the value of a plain argument, the object's name if it has one, otherwise the type."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, LocalBatch):
        return f"batch {value.fingerprint:08x}"
    return names.get(id(value), type(value).__name__)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in an argument, and the fingerprints of loaders' batches."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, LocalBatch):
        yield value.fingerprint
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


class FirstAgain(Generic[K]):
    """The first of a loop's calls, by some key: the first that is made a second time.

    Until there is one, it is the program's first call. A program may have several loops: another call takes
    its place if it is made twice in the meantime.

    Attributes:
        key: the key of that call; None before any call.
        refused: keys of calls that turned out not to be the first.
    """

    def __init__(self) -> None:
        self.key: K | None = None
        self.refused: set[K] = set()
        self._since: set[K] = set()  # keys of calls since that call was last made

    def note(self, key: K) -> None:
        """Take note of a call."""
        if self.key is None or (key in self._since and key not in self.refused):
            self.key = key
        if key == self.key:
            self._since.clear()
        else:
            self._since.add(key)


class LoopStart:
    """Where newcomers start: at the first call of the loop's body.

    Names of calls are the same on all workers, places may not be. So by its name the call is known in the
    same way on all workers, while by its place one worker decides whether newcomers start there.
    """

    def __init__(self) -> None:
        self._num_made = 0
        self._by_name = FirstAgain[str]()
        self._by_place = FirstAgain[Call]()

    @property
    def name(self) -> str | None:
        """The name of the first call; None before any call."""
        return self._by_name.key

    def note(self, call: Call, number: int) -> None:
        """Take note of the call with this number; a call that is repeated has the same number."""
        if number >= self._num_made:
            self._num_made = number + 1
            self._by_name.note(call.name)
            self._by_place.note(call)

    def is_at(self, call: Call) -> bool:
        """Return whether newcomers start at this call."""
        return call == self._by_place.key

    def refuse(self, call: Call, first: Call) -> None:
        """Take note that newcomers started with `first` where they were to start with `call`."""
        self._by_place.refused.add(call)
        self._by_place.key = first
