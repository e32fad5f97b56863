"""Warns of losses that are sums over a tower's rows, where `Tower.backward` expects their mean."""

from __future__ import annotations

from samestep.errors import warn

__all__ = ["SummedLosses"]


class SummedLosses:
    """Warns, once, if all passes of a step pass the sum of their rows' losses as if it were their mean."""

    def __init__(self) -> None:
        self._has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._lines = set[str | None]()

    def note(self, line: str | None) -> None:
        """Note where a pass summed its loss; None if it did not."""
        self._lines.add(line)

    def check(self, who: str) -> None:
        """Warn if all passes up to this one have summed their losses."""
        if not self._has_warned and len(self._lines) == 1 and None not in self._lines:
            self._has_warned = True
            warn(
                f"{who}: its loss is a sum over rows, made in {self._lines.pop()}: tower.backward takes the "
                "mean over the tower's rows, so the gradient depends on the number of towers, and rows of "
                "larger towers weigh more; call tower.backward_sum(total, tower.rows), or return "
                "samestep.LossSum(total, count) from a Step's loss_fn, which give the mean over the batch; "
                "the gradient of its sum is as many times larger as there are rows in the batch"
            )
