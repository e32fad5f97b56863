"""Warns of what is passed as a sum with its count, and is none, or has a count of something else."""

from __future__ import annotations

import math
from collections.abc import Mapping

from samestep.errors import warn
from samestep.watching.losses.batch_divisor import divisor_of_batch
from samestep.watching.losses.row_sums import RowSum

__all__ = ["Totals"]

_ROUNDING = 1e-3


class Totals:
    """Warns, once, of totals that a worker's passes hand in with their counts."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._most_elements = 0
        self._parts: dict[str, list[tuple[RowSum | None, int, float]]] = {}

    def note(self, tower: str, rows: int, sums: Mapping[str, RowSum], counts: Mapping[str, float]) -> None:
        """Note the totals of a pass over so many rows, by name; warn of one that is no sum over rows."""
        for name, found in sums.items():
            count = counts[name]
            if count <= 1:
                continue
            divisor = _divisor(found, rows, count)
            if divisor is not None:
                self._warn(
                    f"{tower}: {name} is a mean, made in {found.line}: it was divided by {divisor:g}, and "
                    f"samestep divides it again, by all towers' counts (here {count:g}), so the gradient is "
                    "smaller by that factor: pass the undivided sum"
                )
            elif found.added and rows > 1:
                self._warn(
                    f"{tower}: {name} has a term, added in {found.added}, that does not grow with the number "
                    "of rows, as sums do: a mean, or a penalty of weights. samestep divides it by all "
                    f"towers' counts (here {count:g}), so it would weigh less by that factor than in a mean: "
                    "multiply it by the count"
                )

    def note_counts(
        self, rows: int, sums: Mapping[str, RowSum], counts: Mapping[str, float], most_elements: int
    ) -> None:
        """Note counts that are not computed from a tower's rows, and how large a tensor of these is."""
        self._most_elements = max(self._most_elements, most_elements)
        for name, count in counts.items():
            self._parts.setdefault(name, []).append((sums.get(name), rows, count))

    def check(self, who: str, num_towers: int, batch_rows: int) -> None:
        """After a worker's last tower, warn if all its passes had a count of the whole batch."""
        for name, parts in self._parts.items():
            found = divisor_of_batch(parts, num_towers, batch_rows, most_own=self._most_elements)
            if found is not None:
                count, of_what = found
                self._warn(
                    f"{who}: {name} comes with the count {count:g}, {of_what}. samestep divides the sum of "
                    "all towers' totals by the sum of their counts, so the gradient is smaller by about "
                    f"{num_towers}, the number of towers: pass the tower's own count, such as tower.rows"
                )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(message)


def _divisor(found: RowSum, rows: int, count: float) -> float | None:
    """Return by what a total over so many rows was divided, if it is a mean; else None."""
    if not found.weight * found.written:
        return None
    divisor, per_row = 1 / (found.weight * found.written), found.num_terms / rows
    is_mean = found.factor == 0 and math.isclose(divisor, found.num_terms, rel_tol=_ROUNDING)
    is_of_means = math.isclose(divisor, per_row, rel_tol=_ROUNDING)  # of each row
    is_written = not math.isclose(found.written, 1)
    is_divided = math.isclose(divisor, count, rel_tol=_ROUNDING) and not is_of_means
    return divisor if (is_mean or is_divided) and not is_written else None
