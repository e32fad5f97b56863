"""What a step returns: loss, counts, gradient norm, noise scale."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Report", "mean_losses", "total_loss"]


@dataclass(frozen=True, eq=False)
class Report:
    """What a step returns, the same on all workers. Losses and count are computed when they are read.

    Attributes:
        step: number of the step, from 0.
        rows: rows of the global batch.
        loss_sums: each tower's summed losses, float64 [T, K]: one column for each of `names`, or one; 0 for
            towers without rows. [1, 1] after a loss of the whole batch.
        counts: what these sums are divided by, in the same shape; 1 after a loss of the whole batch.
        norm: the 2-norm of the averaged gradient, 0-dim; see `grad_norm`.
        names: names of the K sums in the loss; empty if the loss is one sum without a name.
        skipped: whether the update was skipped, because the average was not finite or nothing counted.
        tower_grad_norms: the 2-norm of each tower's own mean gradient, without the loss scale; NaN for a
            tower that counts 0; None in steps that do not measure it.
        noise_scale: the gradient noise scale in rows, smoothed over all measurements so far; infinite if the
            noise hides the gradient; None before the first measurement.
        flags: the flags of all workers, combined by OR (see `Towers.__call__`).

    Example:
        >>> from samestep import Towers
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> towers = Towers(model, 2)
        >>> for tower in towers(torch.tensor([[1.0], [2.0], [3.0]])):
        ...     tower.backward(model(tower.batch).mean())
        >>> report = towers.average()
        >>> report.loss, report.tower_losses, report.rows, report.grad_norm
        (2.0, [1.5, 3.0], 3, 2.0)
    """

    step: int
    rows: int
    loss_sums: Tensor
    counts: Tensor
    norm: Tensor
    names: tuple[str, ...] = ()
    skipped: bool = False
    tower_grad_norms: list[float] | None = None
    noise_scale: float | None = None
    flags: int = 0

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, Report) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.step, self.rows))

    @property
    def _values(self) -> list[object]:
        found = [getattr(self, each.name) for each in fields(self)]
        return [value.tolist() if isinstance(value, Tensor) else value for value in found]

    @cached_property
    def loss(self) -> float:
        """The mean loss over all rows, tokens, pixels or whatever is counted; the sum of `losses`, if any."""
        return float(total_loss(self.loss_sums, self.counts))

    @cached_property
    def losses(self) -> dict[str, float]:
        """The mean of each named sum, divided by its own count; NaN where the count is 0."""
        return dict(zip(self.names, mean_losses(self.loss_sums, self.counts).tolist(), strict=False))

    @cached_property
    def count(self) -> float:
        """How many rows, tokens or pixels the loss is a mean over; the total of all named counts."""
        return float(self.counts.sum())

    @cached_property
    def tower_losses(self) -> list[float]:
        """Each tower's own mean loss, or the sum of the means of its named sums; NaN where it counts 0."""
        losses: list[float] = total_loss(self.loss_sums[:, None], self.counts[:, None]).tolist()
        return losses

    @cached_property
    def grad_norm(self) -> float:
        """The 2-norm of the averaged gradient as `Towers.average` returned it, before clipping."""
        return float(self.norm)


def mean_losses(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each sum over all towers, [..., K], from sums and counts [..., T, K]."""
    return sums.sum(-2) / counts.sum(-2)


def total_loss(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the means whose count is above 0, [...]; NaN if there are none."""
    has_any = counts.sum(-2) > 0
    means = torch.where(has_any, mean_losses(sums, counts), 0).sum(-1)
    return torch.where(has_any.any(-1), means, torch.nan)
