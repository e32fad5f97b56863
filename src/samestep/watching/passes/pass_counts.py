"""Finds numbers that count passes: a weight of the loss that grows from one tower's pass to the next.

Python does not say how a number was computed. So this compares the numbers that the operators of successive
passes take as arguments: with a counter of passes, the numbers at one place change from pass to pass in
almost equal steps, or by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.operators.operator_calls import is_arithmetic
from samestep.watching.passes.held_number import is_simple

__all__ = ["PassCounts"]

_FEW, _MANY = 3, 5  # passes
_EXACT, _ALMOST = 1e-6, 0.1


class _Number(NamedTuple):
    """A number that an operator takes."""

    func: Any
    value: float


class _Pass(NamedTuple):
    """The numbers in a pass, in the order in which operators take them."""

    shapes: tuple[torch.Size, ...]  # of its rows
    numbers: list[_Number]


class PassCounts:
    """The numbers in the passes of a step.

    They are compared between passes over rows that differ at most in how many they are. At least two must
    have the same shapes, because numbers may be computed from these.

    Attributes:
        has_warned: whether there has been a warning.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        self._passes: dict[tuple[torch.Size, ...], list[_Pass]] = {}
        self._earlier: list[_Pass] = []
        self._own = _Pass((), [])
        self._taken: list[float] = []

    def start_pass(self, rows: Iterable[Tensor]) -> None:
        """Begin a tower's pass over these rows."""
        held = list(rows)
        shapes = () if any(tensor.is_nested for tensor in held) else tuple(tensor.shape for tensor in held)
        passes = self._passes.setdefault(tuple(shape[1:] for shape in shapes), [])
        self._earlier, self._own, self._taken = passes[:], _Pass(shapes, []), []
        if shapes:
            passes.append(self._own)

    def take(self, func: Any, arguments: Iterable[Any]) -> bool:
        """Return whether an operator takes a number that counts passes, as far as is known so far."""
        if self.has_warned:
            return False
        found = False
        for value in _numbers(func, arguments):
            at = len(self._own.numbers)
            self._own.numbers.append(_Number(func, value))
            before = [each.numbers[at] for each in self._earlier if at < len(each.numbers)]
            is_same_place = len(before) == len(self._earlier) and all(each.func is func for each in before)
            series = [*(each.value for each in before), value]
            if is_same_place and self._has_like() and _counts(series):
                self._taken, found = self._taken or series, True
        return found

    def _has_like(self) -> bool:
        shapes = [each.shapes for each in (*self._earlier, self._own)]
        return len(set(shapes)) < len(shapes)

    def check(self, who: str) -> None:
        """Warn, once, of the numbers that a pass has taken, if its loss depends on them."""
        if not self.has_warned:
            self.has_warned = True
            *before, last = self._taken[-_FEW:]
            warn(
                f"{who}: its loss depends on the number {last:.6g}, where the passes before had "
                f"{' and '.join(f'{each:.6g}' for each in before)}: if it counts passes, it depends on the "
                "number of workers: compute it from towers.step, or before the loop"
            )


def _numbers(func: Any, arguments: Iterable[Any]) -> Iterator[float]:
    """Yield the floats that an operator takes, the integers in arithmetic, and that of `torch.tensor`."""
    takes_whole = is_arithmetic(func)
    is_made = func is torch.ops.aten.lift_fresh.default
    for each in arguments:
        is_scalar = is_made and isinstance(each, Tensor) and each.numel() == 1 and not each.is_complex()
        if type(each) is float or (takes_whole and type(each) is int) or is_scalar:
            yield float(each)


def _counts(series: list[float]) -> bool:
    """Say whether numbers change in equal steps or by one factor; of many, in almost equal steps.

    Simple fractions need many, as numbers of a few rows or labels may do so by chance.
    """
    if len(series) < _FEW or not all(map(math.isfinite, series)):
        return False
    steps = [after - before for before, after in pairwise(series)]
    if 0 in steps or len({step > 0 for step in steps}) > 1:
        return False
    is_many = len(series) >= _MANY
    if not is_many and any(map(is_simple, series)):
        return False
    if all(math.isclose(*pair, rel_tol=_ALMOST if is_many else _EXACT) for pair in pairwise(steps)):
        return True
    return 0 not in series and all(
        math.isclose(*pair, rel_tol=_EXACT)
        for pair in pairwise(after / before for before, after in pairwise(series))
    )
