"""Warns of losses that combine a tower's rows with each other, as if they were all rows of the batch."""

from __future__ import annotations

from samestep.errors import warn
from samestep.watching.losses.row_comparisons import Combination

__all__ = ["CombinedRows"]

_INSTEAD = (
    "call towers.whole_batch(batch, forward, loss) instead of the loop over towers, or give a Step "
    "forward=forward"
)


class CombinedRows:
    """Warns, once, of losses that combine rows, if there are several towers."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._found: Combination | None = None

    def note(self, found: Combination | None) -> None:
        """Note what combines rows in the loss of a pass, if anything does."""
        self._found = self._found or found

    def check(self, who: str, num_towers: int) -> None:
        """Warn if a pass up to this one has combined rows."""
        if self._found is not None and num_towers > 1 and not self._has_warned:
            self._has_warned = True
            warn(_message(who, self._found))


def _message(who: str, combined: Combination) -> str:
    if combined.how == "function":
        return (
            f"{who}: its loss has {combined.made}. The mean of towers' values is not the value of all rows "
            f"of the batch, so the gradient depends on the number of towers: {_INSTEAD}, or take the mean of "
            "values of single rows"
        )
    if combined.how == "time":
        return (
            f"{who}: its loss takes rows for time steps, through {combined.made}. Towers are cut along the "
            "first dimension of the batch's tensors, and a tower has only its own rows, so the gradient "
            "depends on the number of towers: give towers tensors of shape [rows, time, ...], and layers "
            "batch_first=True, or transpose in each pass; if all rows of the batch should be combined, "
            f"{_INSTEAD}"
        )
    return (
        f"{who}: its loss compares rows with each other, through {combined.made}. A tower has only its own "
        "rows: rows of different towers are not compared, so the gradient depends on the number of towers; "
        f"to compare all rows of the batch, {_INSTEAD}"
    )
