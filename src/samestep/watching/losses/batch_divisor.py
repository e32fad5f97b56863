"""Says whether sums over towers' rows were divided by a number of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from samestep.watching.losses.row_sums import RowSum

__all__ = ["divisor_of_batch"]

_ROUNDING = 1e-3


def divisor_of_batch(
    parts: Sequence[tuple[RowSum | None, int, float]],
    num_towers: int,
    batch_rows: int,
    *,
    most_own: int = 0,
) -> tuple[float, str] | None:
    """Return by what a worker's passes have divided their sums, if it is a number of the whole batch.

    Args:
        parts: the sum of each pass, its rows, and by what else it is divided.
        num_towers: of the step.
        batch_rows: of all towers.
        most_own: what a tower may count itself.

    Returns:
        the number, and what it counts, in words; None if it may be a tower's own.
    """
    known = [
        (found.num_terms, rows, more / _weight(found, batch_rows))
        for found, rows, more in parts
        if found is not None and found.weight > 0
    ]
    if num_towers == 1 or not known or len(known) < len(parts):
        return None
    divisor = known[0][2]
    is_one = all(math.isclose(each, divisor, rel_tol=_ROUNDING) for _, _, each in known)
    if not is_one or any(num_terms >= divisor * (1 - _ROUNDING) for num_terms, _, _ in known):
        return None
    if math.isclose(divisor, batch_rows, rel_tol=_ROUNDING):
        return divisor, "the rows of the whole batch"
    per_row = [num_terms / rows for num_terms, rows, _ in known]
    if any(math.isclose(divisor, batch_rows * each, rel_tol=_ROUNDING) for each in per_row):
        return divisor, "the elements of the whole batch"
    is_count = math.isclose(divisor, round(divisor), rel_tol=_ROUNDING / max(1, divisor))
    is_of_no_tower = len(known) > 1 and any(round(divisor) % rows for _, rows, _ in known)
    sizes = {num_terms for num_terms, _, _ in known}
    is_possible = most_own < divisor <= num_towers * max(sizes)
    # A weight of the loss looks alike, if towers have equal sizes.
    has_weight = len(sizes) == 1 and any(found is not None and found.is_own_mean for found, _, _ in parts)
    is_told = is_count and is_of_no_tower and is_possible and not has_weight
    return (divisor, "the same in all towers") if is_told else None


def _weight(found: RowSum, batch_rows: int) -> float:
    """Return by what a term was multiplied; a number in the code only counts if it is that of the rows."""
    is_of_rows = math.isclose(found.written * batch_rows, 1, rel_tol=_ROUNDING)
    return found.weight * found.written if is_of_rows else found.weight
