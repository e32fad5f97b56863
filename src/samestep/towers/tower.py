"""A tower: one logical slice of the batch, which the loop over `towers(batch)` yields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from samestep.towers.run import StepRun

__all__ = ["Tower"]


class Tower:
    """One logical slice of the batch, as the loop over `towers(batch)` yields it.

    Attributes:
        index: 0 <= index < T, read-only.
        batch: the tower's rows, nested like the global batch.
        rows: the number of rows, at least 1.

    Example:
        >>> import torch
        >>> from samestep import Towers
        >>> model = torch.nn.Linear(2, 1)
        >>> towers = Towers(model, 2)
        >>> for tower in towers(torch.randn(5, 2)):
        ...     print(tower, tuple(tower.batch.shape))
        ...     tower.backward(model(tower.batch).square().mean())
        Tower(index=0, rows=3) (3, 2)
        Tower(index=1, rows=2) (2, 2)
    """

    def __init__(self, index: int, batch: Any, rows: int, run: StepRun) -> None:
        self._index = index
        self.batch = batch
        self.rows = rows
        self._run = run

    @property
    def index(self) -> int:
        """The tower's number; a pass that reads it may differ from those of other towers."""
        self._run.note_index()
        return self._index

    def backward(self, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Run backward from the tower's loss, and keep the gradient for `Towers.average`.

        Args:
            loss: the mean over the tower's rows, a scalar that requires grad. If the step was started with
                `counts`, a mapping with a sum for each of their names.

        Raises:
            UsageError: backward has run for this tower already, its turn is over, `loss` is not what the
                step expects, or the program called `loss.backward()` itself.
            DisagreementError: the workers have different batches.
        """
        self._run.take_mean(self, loss)

    def backward_sum(self, total: Tensor, count: float | Tensor) -> None:
        """Run backward from a loss that is a sum over tokens, pixels or the like, not a mean over rows.

        The step's loss is the sum of all towers' totals, divided once by the sum of all their counts.

        Args:
            total: the sum, a scalar that requires grad; it need not require grad if the count is 0.
            count: the number of terms in the sum, at least 0: a number or 0-dim tensor.

        Raises:
            UsageError, DisagreementError: as for `backward`, or `count` is not one number.

        Example:
            >>> import torch
            >>> from samestep import Towers
            >>> model, words = torch.nn.Embedding(9, 1), torch.tensor([[3, 1, 0], [4, 0, 0]])  # 0 is padding
            >>> towers = Towers(model, 2)
            >>> for tower in towers(words):
            ...     valid = tower.batch > 0
            ...     tower.backward_sum(model(tower.batch).squeeze(-1)[valid].square().sum(), valid.sum())
            >>> towers.average().count
            3.0
        """
        self._run.take_sum(self, total, count)

    def __repr__(self) -> str:
        return f"Tower(index={self._index}, rows={self.rows})"
