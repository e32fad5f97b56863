"""Finds numbers outside modules that one tower's pass leaves for the next one: a running mean by `.item()`.

Python does not say who uses a number. So this compares: a number in reach of the loop that the pass before
changed, and that an operator of this pass takes as an argument while the program still has that very object.
A number that a pass computes anew is another object, even if equal; one that it takes from a list or from its
code belongs to these, too. A number that follows the step's changes in one pass, so it counts only if several
change it, or one that has read a tensor by `.item()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.passes.beside import LEFT_NUMBER
from samestep.watching.passes.carried_numbers import CarriedNumbers, rounded
from samestep.watching.passes.held_number import HeldNumber, is_number
from samestep.watching.program.reach import Named, in_reach, let_go_of_variables

__all__ = ["KeptNumbers"]

_MOST_ELEMENTS = 64


class _Left(NamedTuple):
    """A number that the pass before has left."""

    name: str
    number: HeldNumber


class KeptNumbers:
    """The numbers that passes of a step leave and take.

    Attributes:
        carried: the numbers that passes compute from what the ones before left.
        has_warned: whether there has been a warning.
        has_read: whether this pass has read a tensor that depends on its rows.
    """

    def __init__(self, search: Callable[..., list[Named]] = in_reach) -> None:
        self._search = search
        self._taken: set[str] = set()  # names of numbers that this pass has taken
        self.carried = CarriedNumbers(search)
        self.has_warned = False
        self._added: dict[tuple[str, int], float] = {}  # by passes, such as to a list, and still there
        self.start_step()

    def start_step(self) -> None:
        """Forget the numbers of the step before."""
        self._last: dict[tuple[str, int], float] | None = None  # None before the first pass
        self._left: dict[float, _Left] = {}
        self._changed: set[tuple[str, int]] = set()  # by earlier passes of the step
        self.carried.start_step()
        self._is_idle = self.has_read = False

    def start_pass(self, functions: Iterable[Named]) -> None:
        """Begin a tower's turn; before the first one, note the numbers in reach of loop and `functions`."""
        self._functions, self._taken, self.has_read = list(functions), set(), False
        self.carried.start_pass()
        if self._last is None and not self.has_warned:
            self._last = self._current()
            self._added = {key: value for key, value in self._added.items() if self._last.get(key) == value}

    def end_turn(self, pass_function: Callable[[Any], Any] | None = None, *, is_explained: bool) -> None:
        """Find the numbers that a tower's turn has left; warn, once, of those that it carries on and uses.

        Unless that is explained: by another warning, or by the index of a tower, for which it may be kept.
        `pass_function` is as for `Watch.start_step`.
        """
        self._left = {}
        if self.has_warned or self._last is None:
            return
        # A search takes milliseconds.
        now = self._last if self._is_idle and not self.has_read else self._current()
        new = now.keys() - self._last.keys()
        changed = {key for key, value in now.items() if self._last.get(key, value) != value}
        counted = changed if self.has_read else changed & self._changed
        if not is_explained:
            # A sum that begins at 0 is at first what a pass adds. As a generator, because references to
            # numbers are counted below.
            may_be_left = counted | (self._added.keys() & now.keys())
            numbers = (now[key] for key in may_be_left if self._last.get(key))
            known, moved = ({name for name, _ in keys} for keys in (now, changed | new))
            self.has_warned = self.carried.check(known, moved, numbers, self._functions, pass_function)
        num_found = Counter(map(id, now.values()))
        for key in counted:
            left = _Left(key[0], HeldNumber(now[key]))
            is_shared = left.number.note() > num_found[id(now[key])] + 1
            if not (is_shared or now[key].is_integer()):
                self._left[abs(now[key])] = left
        self._changed |= changed
        self._added = {key: now[key] for key in now.keys() & (new | self._added.keys())}
        self._last, self._is_idle = now, not changed

    def _current(self) -> dict[tuple[str, int], float]:
        return dict(_numbered(self._search(is_number, self._functions)))

    def note_read(self, value: Any, towers: int, own: int) -> None:
        """Note that the pass has read, in Python, the value of a tensor of these towers, as bits."""
        self.has_read |= bool(towers & own)
        if towers != own and not self.has_warned:
            self.carried.note_read(value, is_left=bool(towers & ~own))

    def take(self, func: Any, arguments: Collection[Any]) -> int:
        """Return the bits of numbers that an operator takes; `LEFT_NUMBER` if the pass before left one."""
        if self.has_warned:
            return 0
        found = [each for each in arguments if type(each) is float]
        bits = self.carried.take([*found, *_whole_in(arguments)])
        if func is torch.ops.aten.lift_fresh.default:  # `torch.tensor(number)`
            for tensor in arguments:
                bits |= self.carried.take_values(tensor)
                found += self._rounded_in(tensor)
        taken = [self._left[abs(each)] for each in found if abs(each) in self._left]
        if taken:
            let_go_of_variables()  # which a pass has set to other objects since
        names = {each.name for each in taken if each.number.is_held}
        self._taken |= names
        return bits | LEFT_NUMBER * bool(names)

    def take_values(self, tensor: Tensor) -> int:
        """Return the bits of a tensor that an operator reads, and that depends on no tower's rows."""
        return 0 if self.has_warned else self.carried.take_values(tensor)

    def note_values(self, tensor: Tensor) -> None:
        """Note a tensor that an operator reads, and that the step has computed of numbers."""
        if not self.has_warned:
            self.carried.note_values(tensor)

    def _rounded_in(self, tensor: Tensor) -> list[float]:
        """Return the numbers that were left and are in a small tensor, rounded to its dtype."""
        if not self._left or tensor.numel() > _MOST_ELEMENTS or not tensor.is_floating_point():
            return []
        elements = tensor.abs().flatten().tolist()
        return [each for each in self._left if rounded(each, tensor.dtype) in elements]

    def check(self, what: str) -> None:
        """Warn, once, of the numbers that a pass has taken, if `what`, such as "its loss depends", does."""
        if not self.has_warned:
            self.has_warned = True
            warn(
                f"{what} on {', '.join(sorted(self._taken))}, a number that another tower's "
                "pass has left; with another number of workers it would be from a different tower: update it "
                "after average(), or set it in each pass before using it"
            )


def _whole_in(arguments: Iterable[Any]) -> Iterator[int]:
    """Yield the whole numbers among an operator's arguments, and the seeds of its generators."""
    for each in arguments:
        if type(each) is int:
            yield each
        elif type(each) is list:  # such as sizes
            yield from _whole_in(each)
        elif isinstance(each, torch.Generator):
            yield each.initial_seed()


def _numbered(found: Iterable[Named]) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield numbers by their names, of which several may be the same."""
    seen = Counter[str]()
    for name, value in found:
        yield (name, seen[name]), value
        seen[name] += 1
