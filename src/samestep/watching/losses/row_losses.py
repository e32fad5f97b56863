"""Warns of losses that are sums over a tower's rows, or that compare its rows with each other."""

from __future__ import annotations

from samestep.errors import warn

__all__ = ["RowLosses"]


class RowLosses:
    """Warns, once of each, of losses that are no means over a tower's rows."""

    def __init__(self) -> None:
        self._has_warned_of_sums = self._has_warned_of_pairs = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._sums = set[str | None]()
        self._pairs: str | None = None

    def note(self, summed_in: str | None, pairs: str | None) -> None:
        """Note where a pass summed its loss, and the pairs of rows that it is made of, if any."""
        self._sums.add(summed_in)
        self._pairs = self._pairs or pairs

    def check(self, who: str) -> None:
        """Warn if all passes up to this one have summed their losses, or if one has compared rows."""
        if len(self._sums) == 1 and None not in self._sums and not self._has_warned_of_sums:
            self._has_warned_of_sums = True
            warn(
                f"{who}: its loss is a sum over rows, made in {self._sums.pop()}: tower.backward takes the "
                "mean over the tower's rows, so the gradient depends on the number of towers, and rows of "
                "larger towers weigh more; call tower.backward_sum(total, tower.rows), or return "
                "samestep.LossSum(total, count) from a Step's loss_fn: both give the mean over the batch's "
                "rows; the gradient of their sum is that, times the number of rows in the batch"
            )
        if self._pairs is not None and not self._has_warned_of_pairs:
            self._has_warned_of_pairs = True
            warn(
                f"{who}: its loss compares rows with each other, through {self._pairs}. A tower has only its "
                "own rows: rows of different towers are not compared, so the gradient depends on the number "
                "of towers; to compare all rows of the batch, call towers.whole_batch(batch, forward, loss) "
                "instead of the loop over towers"
            )
