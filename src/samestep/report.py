"""What one step tells about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """What all workers know alike after a step. Figures are computed when they are read.

    Attributes:
        step: number of the step, from 0.
        rows: rows of the global batch.
        loss_sums: each tower's summed loss, float64 [T]; 0 where it had no rows.
        weights: each tower's weight, float64 [T].
        gradients: the averaged gradients, for `grad_norm`.
        skipped: whether the update was left out because the average was not finite.
    """

    step: int
    rows: int
    loss_sums: Tensor
    weights: Tensor
    gradients: Sequence[Tensor]
    skipped: bool = False

    @cached_property
    def loss(self) -> float:
        """The mean loss over all rows (or tokens, or pixels: whatever the weights count)."""
        return float(self.loss_sums.sum() / self.weights.sum())

    @cached_property
    def weight(self) -> float:
        """The total weight, which the gradient was divided by."""
        return float(self.weights.sum())

    @cached_property
    def tower_losses(self) -> list[float]:
        """Each tower's own mean loss; NaN where its weight is 0."""
        losses: list[float] = (self.loss_sums / self.weights).tolist()
        return losses

    @cached_property
    def grad_norm(self) -> float:
        """The 2-norm of the averaged gradient. Read it before something changes the gradients."""
        return float(torch.nn.utils.get_total_norm(self.gradients))
