"""Finds losses that are not means over a tower's rows, but over its labels, or over what a mask selects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from samestep.errors import warn

__all__ = ["Mean", "Means"]

_ROUNDING = 1e-5  # of sums of weights in float32


class Mean(NamedTuple):
    """A mean that a pass has computed.

    Attributes:
        over: what it is over.
        by: how its divisor was found, for messages.
        divisor: what the sum was divided by.
        length: of the first dimension, if the mean is over all elements of a tensor, or all labels.
        is_weighted: whether a sum was divided by the sum of the weights of its terms, or of a mask.
    """

    over: Literal["entries", "labels"]
    by: str
    divisor: float
    length: int | None = None
    is_weighted: bool = False

    @property
    def kind(self) -> str:
        """What it is over, in words."""
        return self.over + self.by


class Means:
    """Compares the means of a worker's passes: they should cover as many entries per row in each tower."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._last: tuple[str, int, Sequence[Mean]] | None = None  # the pass before

    def compare(self, tower: str, rows: int, means: Sequence[Mean]) -> None:
        """Warn, once, if a mean covers another number of entries per row than in the pass before.

        There is no warning for means over as many entries for any number of rows, such as over weights; for
        those over [rows, ...], where each row weighs the same; nor, in towers of one row, for those that are
        not over labels.
        """
        last, self._last = self._last, (tower, rows, means)
        if last is None or self._has_warned:
            return
        before, rows_before, means_before = last
        if [each.kind for each in means] != [each.kind for each in means_before]:
            return
        for old, new in zip(means_before, means, strict=True):
            per_row = old.divisor * rows / rows_before
            is_alike = any(
                math.isclose(new.divisor, each, rel_tol=_ROUNDING) for each in (old.divisor, per_row)
            )
            is_over_rows = (old.length, new.length) == (rows_before, rows)
            is_of_one_row = 1 in (rows, rows_before) and new.over != "labels"
            if not (is_alike or is_over_rows or is_of_one_row):
                self._has_warned = True
                _warn(new, [(before, old.divisor), (tower, new.divisor)])
                return


def _warn(mean: Mean, found: Sequence[tuple[str, float]]) -> None:
    numbers = ", ".join(f"{divisor:g} in {tower}" for tower, divisor in found)
    warn(
        f"a loss is a mean over {mean.kind}: {numbers}. Towers are weighted by their rows, so {mean.over} do "
        "not all weigh the same; if they should, pass their sum and their number, or the sum of their "
        "weights: tower.backward_sum(total, count), or return a samestep.LossSum from a Step's loss_fn; for "
        "a loss of pairs of rows, use whole_batch"
    )
