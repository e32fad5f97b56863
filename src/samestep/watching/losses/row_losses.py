"""Warns of losses that are sums over a tower's rows."""

from __future__ import annotations

from samestep.errors import warn
from samestep.watching.losses.batch_divisor import divisor_of_batch
from samestep.watching.losses.row_sums import RowSum

__all__ = ["RowLosses"]


class RowLosses:
    """Warns, once of each, of losses that are no means over a tower's rows."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._sums = set[str | None]()  # where passes have summed their losses; None in one that has not
        self._has_means = False  # whether such a loss has means, too
        self._parts: list[tuple[RowSum | None, int, float]] = []  # of each loss; see `divisor_of_batch`

    def note(self, found: RowSum | None, rows: int, *, is_mean: bool) -> None:
        """Note the sum that the loss of a pass over so many rows is, if it is one."""
        beside_means = is_mean and found is not None and not found.is_by_loop
        is_sum = found is not None and found.is_sum_over(rows, beside_means=beside_means)
        self._sums.add(found.line if found is not None and is_sum else None)
        self._has_means |= is_sum and beside_means
        self._parts.append((found, rows, 1))

    def check(self, who: str, num_towers: int, batch_rows: int, *, is_scaled: bool) -> None:
        """Warn if all passes up to this one have summed their losses.

        `is_scaled` is whether a warning has named a factor of the loss.
        """
        if self._has_warned:
            return
        if not is_scaled:
            self._check_divisor(who, num_towers, batch_rows)
        line = next(iter(self._sums), None)
        if len(self._sums) == 1 and line is not None and not self._has_warned:
            self._warn_of_sum(who, line)

    def _warn_of_sum(self, who: str, line: str) -> None:
        self._has_warned = True
        if self._has_means:
            warn(
                f"{who}: its loss has a sum over rows, made in {line}, beside means: tower.backward takes "
                "the mean over the tower's rows, so the gradient depends on the number of towers: divide the "
                "sum by tower.rows or, in a Step's loss_fn, by the number of rows that it gets"
            )
            return
        warn(
            f"{who}: its loss is a sum over rows, made in {line}: tower.backward takes the mean over the "
            "tower's rows, so the gradient depends on the number of towers, and rows of larger towers weigh "
            "more; call tower.backward_sum(total, tower.rows), or return samestep.LossSum(total, count) from "
            "a Step's loss_fn: both give the mean over the batch's rows; the gradient of their sum is that, "
            "times the number of rows in the batch"
        )

    def _check_divisor(self, who: str, num_towers: int, batch_rows: int) -> None:
        found = divisor_of_batch(self._parts, num_towers, batch_rows)
        if found is not None:
            self._has_warned = True
            (first, _, _), (divisor, of_what) = self._parts[0], found
            assert first is not None
            warn(
                f"{who}: its loss is a sum over rows, made in {first.line}, divided by {divisor:g}, "
                f"{of_what}. tower.backward expects the mean over the tower's rows; divided by a number of "
                f"the whole batch, the gradient is smaller by about {num_towers}, the number of towers. Pass "
                "this mean; or the sum, undivided, by tower.backward_sum(total, count), or as "
                "samestep.LossSum(total, count) from a Step's loss_fn"
            )
