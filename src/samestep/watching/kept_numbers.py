"""Finds numbers outside modules that one tower's pass leaves for the next one: a running mean by `.item()`.

Python does not say who uses a number. So this compares: a number in reach of the loop that the pass before
changed, after it had read a tensor by `.item()`, and that an operator of this pass takes as an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.reach import Named, in_reach

__all__ = ["KeptNumbers"]

_MOST_ELEMENTS = 64


class KeptNumbers:
    """The numbers that passes of a step leave and take.

    Attributes:
        has_read: whether this pass has read a tensor that depends on its rows.
    """

    def __init__(self, search: Callable[..., list[Named]] = in_reach) -> None:
        self._search = search
        self._taken: dict[str, set[float]] = {}  # the numbers that passes have taken, by name
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the numbers of the step before."""
        self._last: dict[tuple[str, int], float] = {}
        self._left: dict[float, str] = {}
        self.has_read = False

    def start_pass(self, functions: Iterable[Named]) -> None:
        """Note the numbers in reach of the loop and of `functions`, and those that the pass before left."""
        if self._has_warned:
            return
        now = dict(_numbered(self._search(_is_float, functions)))
        changed = {value: key[0] for key, value in now.items() if self._last.get(key, value) != value}
        self._left = {v: name for v, name in changed.items() if not v.is_integer()} if self.has_read else {}
        self._last, self.has_read = now, False

    def take(self, func: Any, arguments: Iterable[Any]) -> bool:
        """Return whether an operator takes a number that the pass before left."""
        if not self._left:
            return False
        found = [each for each in arguments if type(each) is float]
        if func is torch.ops.aten.lift_fresh.default:  # `torch.tensor(number)`
            found += [number for each in arguments for number in self._rounded_in(each)]
        taken = {abs(each) for each in found} & self._left.keys()
        for each in taken:
            self._taken.setdefault(self._left[each], set()).add(each)
        return bool(taken)

    def _rounded_in(self, tensor: Tensor) -> list[float]:
        """Return the numbers that were left and are in a small tensor, rounded to its dtype."""
        if tensor.numel() > _MOST_ELEMENTS or not tensor.is_floating_point():
            return []
        elements = tensor.abs().flatten().tolist()
        return [each for each in self._left if torch.tensor(each, dtype=tensor.dtype).item() in elements]

    def check(self, who: str) -> None:
        """Warn, once, if losses depend on numbers that passes have left: on two of them or more.

        A single one may be a coincidence: a pass may compute the same quotient of sizes as the one before.
        """
        names = [name for name, values in self._taken.items() if len(values) > 1]
        if names and not self._has_warned:
            self._has_warned = True
            warn(
                f"{who}: its loss depends on {', '.join(names)}, a number that another tower's pass has "
                "left; with another number of workers it would be from a different tower: update it after "
                "average(), or set it in each pass before using it"
            )


def _numbered(found: Iterable[Named]) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield numbers by their names, of which elements of a list have the same one."""
    seen = Counter[str]()
    for name, value in found:
        yield (name, seen[name]), abs(value)
        seen[name] += 1


def _is_float(value: object) -> bool:
    return type(value) is float and math.isfinite(value)
