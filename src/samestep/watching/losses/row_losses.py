"""Warns of losses that are sums over a tower's rows, or that combine its rows with each other."""

from __future__ import annotations

import math

from samestep.errors import warn
from samestep.watching.losses.row_pairs import CombinedRows
from samestep.watching.losses.row_sums import RowSum

__all__ = ["RowLosses"]

_ROUNDING = 1e-3


class RowLosses:
    """Warns, once of each, of losses that are no means over a tower's rows."""

    def __init__(self) -> None:
        self._has_warned_of_sums = self._has_warned_of_combined = self._has_warned_of_totals = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._sums = set[str | None]()  # where passes have summed their losses; None in one that has not
        self._parts: list[tuple[RowSum | None, int]] = []  # of the loss of each pass, and its rows
        self._combined: CombinedRows | None = None

    def note(self, found: RowSum | None, combined: CombinedRows | None, rows: int, *, is_mean: bool) -> None:
        """Note the sum that the loss of a pass over so many rows is, and what combines rows in it, if any."""
        is_sum = found is not None and found.is_sum_over(rows) and not is_mean
        self._sums.add(found.line if found is not None and is_sum else None)
        self._parts.append((found, rows))
        self._combined = self._combined or combined

    def check(self, who: str, num_towers: int, batch_rows: int, *, is_scaled: bool) -> None:
        """Warn if all passes up to this one have summed their losses, or if one has combined rows.

        `is_scaled` is whether a warning has named a factor of the loss.
        """
        if len(self._sums) == 1 and None not in self._sums and not self._has_warned_of_sums:
            self._has_warned_of_sums = True
            warn(
                f"{who}: its loss is a sum over rows, made in {self._sums.pop()}: tower.backward takes the "
                "mean over the tower's rows, so the gradient depends on the number of towers, and rows of "
                "larger towers weigh more; call tower.backward_sum(total, tower.rows), or return "
                "samestep.LossSum(total, count) from a Step's loss_fn: both give the mean over the batch's "
                "rows; the gradient of their sum is that, times the number of rows in the batch"
            )
        elif not (self._has_warned_of_sums or is_scaled) and (part := self._part(num_towers, batch_rows)):
            self._has_warned_of_sums = True
            warn(
                f"{who}: {part}. tower.backward expects the mean over the tower's rows; divided by a number "
                f"of the whole batch, the gradient is smaller by about {num_towers}, the number of towers. "
                "Pass this mean; or the sum, undivided, by tower.backward_sum(total, count), or as "
                "samestep.LossSum(total, count) from a Step's loss_fn"
            )
        if self._combined is not None and not self._has_warned_of_combined:
            self._has_warned_of_combined = True
            warn(_of_combined(who, self._combined))

    def check_total(self, what: str, found: RowSum, rows: int, count: float) -> None:
        """Warn if what is passed as a sum over so many rows, with this count, is a mean."""
        if self._has_warned_of_totals or count <= 1 or not found.weight * found.written:
            return
        divisor, per_row = 1 / (found.weight * found.written), found.num_terms / rows
        is_mean = found.factor == 0 and math.isclose(divisor, found.num_terms, rel_tol=_ROUNDING)
        is_of_means = math.isclose(divisor, per_row, rel_tol=_ROUNDING)  # of each row
        if is_mean or (math.isclose(divisor, count, rel_tol=_ROUNDING) and not is_of_means):
            self._has_warned_of_totals = True
            warn(
                f"{what} is a mean, made in {found.line}: it was divided by {divisor:g}, and samestep "
                f"divides it again, by all towers' counts (here {count:g}), so the gradient is smaller by "
                "that factor: pass the undivided sum"
            )

    def _part(self, num_towers: int, batch_rows: int) -> str:
        """Say by what all passes have divided their sums, if by a number of the whole batch; else ""."""
        parts = [(found, rows) for found, rows in self._parts if found is not None and found.weight > 0]
        if num_towers == 1 or not parts or len(parts) < len(self._parts):
            return ""
        divisor = 1 / parts[0][0].weight
        is_known = all(
            math.isclose(1 / found.weight, divisor, rel_tol=_ROUNDING)
            and found.num_terms < divisor * (1 - _ROUNDING)
            for found, _ in parts
        )
        if not is_known:
            return ""
        in_words = f"its loss is a sum over rows, made in {parts[0][0].line}, divided by {divisor:g}"
        if math.isclose(divisor, batch_rows, rel_tol=_ROUNDING):
            return f"{in_words}, the rows of the whole batch"
        per_row = [found.num_terms / rows for found, rows in parts]
        if any(math.isclose(divisor, batch_rows * each, rel_tol=_ROUNDING) for each in per_row):
            return f"{in_words}, the elements of the whole batch"
        is_count = math.isclose(divisor, round(divisor), rel_tol=_ROUNDING / max(1, divisor))
        is_of_no_tower = len(parts) > 1 and any(round(divisor) % rows for _, rows in parts)
        is_possible = divisor <= num_towers * max(found.num_terms for found, _ in parts)
        return f"{in_words}, the same in all towers" if is_count and is_of_no_tower and is_possible else ""


def _of_combined(who: str, combined: CombinedRows) -> str:
    if combined.is_time:
        return (
            f"{who}: its loss takes rows for time steps, through {combined.made}. Towers are cut along the "
            "first dimension of the batch's tensors, and a tower has only its own rows, so the gradient "
            "depends on the number of towers: give towers tensors of shape [rows, time, ...], and layers "
            "batch_first=True, or transpose in each pass; if all rows of the batch should be combined, call "
            "towers.whole_batch(batch, forward, loss) instead of the loop over towers"
        )
    return (
        f"{who}: its loss compares rows with each other, through {combined.made}. A tower has only its own "
        "rows: rows of different towers are not compared, so the gradient depends on the number of towers; "
        "to compare all rows of the batch, call towers.whole_batch(batch, forward, loss) instead of the "
        "loop over towers"
    )
