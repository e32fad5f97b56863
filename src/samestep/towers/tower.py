"""One tower, while it is its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from samestep.errors import UsageError

__all__ = ["HandIn", "Loss", "Tower"]

Loss = Tensor | Mapping[str, Tensor]
HandIn = Callable[["Tower", Loss, "float | Tensor | None"], None]


class Tower:
    """One logical slice of the batch, while it is its turn.

    Attributes:
        index: 0 <= index < T.
        batch: the tower's own rows of the batch, in the same nest.
        rows: how many.
        is_done: whether it has handed in.
    """

    def __init__(self, index: int, batch: Any, rows: int, hand_in: HandIn) -> None:
        self.index = index
        self.batch = batch
        self.rows = rows
        self.is_done = False
        self._has_turn = True
        self._hand_in = hand_in

    def backward(self, loss: Loss, *, weight: float | Tensor | None = None) -> None:
        """Hand in the tower's loss: compute its gradient and keep it for `Towers.average`.

        Args:
            loss: a scalar that requires grad. Without `weight`, a mean over the tower's rows; with it, a
                sum over whatever `weight` counts. Where the step began with `weights`, a mapping that has
                a sum for each of their names.
            weight: how much the tower counts, such as its valid tokens or pixels. A tower may count 0;
                its loss is then a sum over nothing, which need not require grad.

        Raises:
            UsageError: the tower has handed in already, its turn is over, `loss` is not what the step
                expects, or gradients came from a `loss.backward()` past the tower.
            DisagreementError: workers turn out to have different batches.
        """
        if self.is_done or not self._has_turn:
            why = "has run backward already" if self.is_done else "has no turn any more"
            raise UsageError(f"{self!r} {why}: call backward once, inside the loop over towers(batch)")
        self._hand_in(self, loss, weight)
        self.is_done = True

    def end_turn(self) -> None:
        """Refuse whatever is handed in from now on."""
        self._has_turn = False

    def __repr__(self) -> str:
        return f"Tower(index={self.index}, rows={self.rows})"
