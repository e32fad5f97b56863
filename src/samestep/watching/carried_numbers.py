"""Finds numbers that a pass computes from what the pass before left, and takes itself: a mean updated first.

Python does not say from what a number is computed. So this looks at those that operators of a pass take, and
that the program has when it ends; the program's code shows the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.beside import MOST_OWN_NUMBERS, own_number
from samestep.watching.carried import carried_sources, plain_name
from samestep.watching.program_line import ProgramLine
from samestep.watching.reach import Named

__all__ = ["CarriedNumbers", "rounded"]

_MOST_ELEMENTS = 8


class CarriedNumbers:
    """The numbers that passes of a step take.

    Args:
        search: `in_reach`.
    """

    def __init__(self, search: Callable[..., list[Named]]) -> None:
        self._search = search
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        # By number, and by dtype if it was rounded to one.
        self._bits: dict[tuple[float, torch.dtype | None], int] = {}
        self._fresh: set[str] = set()  # names of numbers that no pass computes from what it finds
        self.start_pass()

    def start_pass(self) -> None:
        """Begin a pass, which has used nothing."""
        self._used, self._what = 0, ""

    def take(self, numbers: Iterable[float], dtype: torch.dtype | None = None) -> int:
        """Return the bits of numbers that an operator takes, rounded to a dtype if they were."""
        bits = 0
        for number in numbers:
            key = abs(number), dtype
            if not number.is_integer() and (key in self._bits or len(self._bits) < MOST_OWN_NUMBERS):
                bits |= self._bits.setdefault(key, own_number(len(self._bits)))
        return bits

    def take_copy(self, tensor: Tensor) -> int:
        """Return the bits of numbers in a tensor that `torch.tensor` has made of them."""
        if tensor.numel() > _MOST_ELEMENTS or not tensor.is_floating_point():
            return 0
        return self.take(tensor.flatten().tolist(), tensor.dtype)

    def note_used(self, what: str, bits: int) -> None:
        """Note the bits of what a pass's loss or gradients depend on, as `what` says: "its loss depends"."""
        self._used |= bits
        self._what = self._what or what

    def check(
        self, left: Iterable[tuple[str, float]], changed: Iterable[str], functions: Iterable[Named]
    ) -> bool:
        """Warn of numbers that the pass has used, and computed from what it has found and changed.

        Args:
            left: numbers that it leaves, by name.
            changed: the names of all that it has changed.
            functions: what it has run, beside the functions on this thread's stack.

        Returns:
            whether there was a warning.
        """
        used = {name: number for name, number in left if self._is_used(number)}
        parts = {part for name in changed for part in plain_name(name).split(" of ")} - {"self"}
        for name in used.keys() - self._fresh:
            sources = self._sources_of(name, used[name], functions)
            if not any(source.partition(" of ")[0] in parts for source in sources):
                self._fresh.add(name)
        # A sum for a log may begin with a number that a pass has computed anew: then it's that one.
        fresh = {abs(used[name]) for name in used.keys() & self._fresh}
        names = [name for name, number in used.items() if abs(number) not in fresh]
        if names:
            warn(
                f"{self._what} on {', '.join(sorted(names))}, a number that each pass computes from what the "
                "one before has left; with another number of workers it would be from a different tower: "
                "update it after average(), or compute it from this tower's rows alone"
            )
        return bool(names)

    def _sources_of(self, name: str, number: float, functions: Iterable[Named]) -> set[str]:
        """Return what the program computes a number from, and carries on."""
        name = plain_name(name)
        attribute, of, variable = name.partition(" of ")[0], " of " in name, name.rpartition(" of ")[2]
        sharing = [found.__code__ for _, found in self._search(partial(_shares, variable), functions)]
        sources = carried_sources(name, ProgramLine.all_running(), sharing)
        for _, holder in self._search(partial(_holds, number), functions) if of else ():
            sources |= carried_sources(f"{attribute} of self", (), _methods_of(type(holder)))
        return sources

    def _is_used(self, number: float) -> bool:
        dtypes = {dtype for _, dtype in self._bits}
        return any(self._used & self._bits.get((abs(rounded(number, each)), each), 0) for each in dtypes)


def rounded(number: float, dtype: torch.dtype | None) -> float:
    """Return a number as a tensor of this dtype holds it; itself without a dtype."""
    return number if dtype is None else torch.tensor(number, dtype=dtype).item()


def _shares(variable: str, value: Any) -> bool:
    """Say whether this is a function that uses a variable of another one, or a global."""
    is_function = type(value) is FunctionType
    return is_function and variable in (*value.__code__.co_freevars, *value.__code__.co_names)


def _holds(number: float, value: Any) -> bool:
    """Say whether a number is an attribute of an object, unless reading that could load or call something."""
    is_usual: bool = type(value).__getattribute__ is vars(object)["__getattribute__"]
    return is_usual and any(each is number for each in vars(value).values())


def _methods_of(kind: type) -> list[CodeType]:
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    return [each.__code__ for each in methods.values() if isinstance(each, FunctionType)]
