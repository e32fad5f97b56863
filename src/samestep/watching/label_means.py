"""Finds means over labels that are passed as means over rows, although labels per row differ by tower.

And other sums that passes divide by a count of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from samestep.batches.nest import tensors
from samestep.errors import warn
from samestep.watching.divisors import Divisor
from samestep.watching.outside import graph_of

__all__ = ["LabelMeans"]

_NODES = ("NllLossBackward0", "NllLoss2DBackward0")  # `F.cross_entropy` and `F.nll_loss` make these
_REMEDY = (
    "Towers are weighted by their rows, so labels do not all weigh the same; if they should, pass their sum "
    "and their number, or the sum of their weights: tower.backward_sum(total, count), or return a "
    "samestep.LossSum from a Step's loss_fn"
)
_MEAN = 1  # torch's number for reduction="mean"


class _Tower(Protocol):
    @property
    def batch(self) -> Any: ...
    @property
    def rows(self) -> int: ...


class _Labels(NamedTuple):
    """For each tensor in a tower's batch: how many entries it has, and how many are not ignored."""

    tower: str
    rows: int
    nums: Sequence[tuple[int, int] | None]  # None for what cannot be labels


class LabelMeans:
    """Compares the towers of a worker: how many labels a mean covers, and what other sums are divided by."""

    def __init__(self) -> None:
        self._has_warned = False
        self._before: dict[tuple[int, bool], _Labels] = {}
        self._divided: tuple[str, int, Sequence[Divisor]] | None = None  # by the pass before

    def start_step(self) -> None:
        """Forget the towers of another step."""
        self._before.clear()
        self._divided = None

    def look(self, tower: _Tower, loss: Tensor) -> None:
        """Look at the graph of a loss that was passed as a mean over the tower's rows.

        This reads only attributes that are plain numbers: reading a saved tensor could run a forward again,
        under activation checkpointing.
        """
        if self._has_warned:
            return
        means = [n for n in graph_of([loss]) if n.name() in _NODES and n._saved_reduction == _MEAN]
        for mean in {(_signed(n._saved_ignore_index), _num_labels(n) == tower.rows) for n in means}:
            ignored, is_of_rows = mean
            labels = _labels(tower, ignored, is_of_rows=is_of_rows)
            before = self._before.setdefault(mean, labels)
            found = _first_difference(before, labels)
            if found is not None:
                self._has_warned = True
                _warn(ignored, [before.tower, labels.tower], found)
                return

    def compare(self, tower: _Tower, divisors: Sequence[Divisor]) -> None:
        """Compare what this pass divided sums by, for its rows, with what the pass before did."""
        before, self._divided = self._divided, (repr(tower), tower.rows, divisors)
        if before is None or self._has_warned:
            return
        name, rows, others = before
        for old, new in zip(others, divisors, strict=False):
            if old.what == new.what and old.value * tower.rows != new.value * rows:
                self._has_warned = True
                found = f"{old.value:g} in {name}, {new.value:g} in {tower!r}"
                warn(f"a loss is a sum divided by {new.what}: {found}. {_REMEDY}")
                return


def _num_labels(node: Any) -> int:
    """Return how many labels a mean had, ignored ones included, from the shape of its log-probabilities."""
    source, output = node.next_functions[0]
    shape = source._input_metadata[output].shape  # [labels, classes], [rows, classes, ...] or [classes]
    return math.prod(shape) // shape[1] if len(shape) > 1 else 1


def _labels(tower: _Tower, ignored: int, *, is_of_rows: bool) -> _Labels:
    # If the mean has one label per row, tensors of tokens are not its labels, but may contain `ignored`.
    found = [
        None if is_of_rows and isinstance(each, Tensor) and each.numel() != tower.rows else each
        for each in tensors(tower.batch)
    ]
    return _Labels(repr(tower), tower.rows, [_numbers(each, ignored) for each in found])


def _numbers(values: object, ignored: int) -> tuple[int, int] | None:
    if not isinstance(values, Tensor) or values.dtype != torch.int64 or not values.numel():
        return None
    # Masks and other 0/1 tensors may contain a non-negative `ignored`, but are not labels.
    if ignored >= 0 and int(values.max()) <= 1:
        return None
    return values.numel(), int((values != ignored).sum())


def _first_difference(one: _Labels, other: _Labels) -> tuple[int, int] | None:
    """Return the first pair of numbers of labels that are not in proportion to the two towers' rows."""
    for mine, theirs in zip(one.nums, other.nums, strict=False):
        if mine is None or theirs is None or (mine[0] == mine[1] and theirs[0] == theirs[1]):
            continue
        if mine[1] * other.rows != theirs[1] * one.rows:
            return mine[1], theirs[1]
    return None


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _warn(ignored: int, towers: Sequence[str], nums: Sequence[int]) -> None:
    found = ", ".join(f"{num} in {tower}" for num, tower in zip(nums, towers, strict=True))
    warn(f"a loss is a mean over the labels other than {ignored}: {found}. {_REMEDY}")
