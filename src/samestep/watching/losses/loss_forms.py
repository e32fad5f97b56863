"""What the losses of passes are made of, and warnings of those that are no means over a tower's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestep.summation.placement import Placement
from samestep.watching.losses.combined_rows import CombinedRows
from samestep.watching.losses.means import Mean, Means
from samestep.watching.losses.row_comparisons import Combination
from samestep.watching.losses.row_losses import RowLosses
from samestep.watching.losses.row_sums import RowSum
from samestep.watching.losses.scaled_losses import ScaledLosses, Scaling
from samestep.watching.losses.totals import Totals

__all__ = ["LossForm", "LossForms"]


class LossForm(NamedTuple):
    """What the loss of a pass is made of, as far as its operators were followed.

    Attributes:
        scaling: how means were scaled to give it, if they were.
        means: those that it is made of.
        sums: of what sums over the rows it, the "loss", is made, or each of its sums by name, if of any.
        most_elements: of a tensor of the tower's batch.
        has_own_count: whether a count that comes with it may be computed from the tower's rows.
        combined: what it is made of that combines rows with each other; None if nothing does.
    """

    scaling: Scaling | None
    means: Sequence[Mean]
    sums: Mapping[str, RowSum]
    most_elements: int
    has_own_count: bool
    combined: Combination | None


class LossForms:
    """Compares the losses of a worker's passes, and warns, once of each kind, of those that are no means."""

    def __init__(self) -> None:
        self._means, self._scaled, self._rows = Means(), ScaledLosses(), RowLosses()
        self._totals, self._combined = Totals(), CombinedRows()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        for each in (self._means, self._scaled, self._rows, self._totals, self._combined):
            each.start_step()

    def note(self, tower: str, rows: int, form: LossForm, counts: Mapping[str, float] | None) -> None:
        """Note the loss of a tower's pass over so many rows; warn of means over other things than rows.

        Or, if it comes with `counts` by name, warn of totals that are no sums, or that were divided already.
        """
        self._combined.note(form.combined)
        if counts is not None:
            self._totals.note(tower, rows, form.sums, counts)
            if not form.has_own_count:
                self._totals.note_counts(rows, form.sums, counts, form.most_elements)
            return
        if form.combined is not None and form.combined.how == "pairs":
            return  # what its sums were divided by is no matter
        self._means.compare(tower, rows, form.means)
        self._scaled.note(form.scaling)
        if rows > 1:  # otherwise, a sum over rows is a mean
            is_mean = any(mean.divisor >= rows or mean.is_weighted for mean in form.means)
            self._rows.note(form.sums.get("loss"), rows, is_mean=is_mean)

    def check(self, tower: str, placement: Placement, batch_rows: int) -> None:
        """After a worker's last tower, warn of what all its passes do."""
        self._scaled.check(tower, placement)
        self._rows.check(tower, placement.num_towers, batch_rows, is_scaled=self._scaled.has_warned)
        self._totals.check(tower, placement.num_towers, batch_rows)
        self._combined.check(tower, placement.num_towers)
