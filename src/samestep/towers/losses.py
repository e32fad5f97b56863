"""A tower's loss: a mean over its rows, a sum and its count, or several named sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.summation.scalars import Scalars

if TYPE_CHECKING:
    from samestep.towers.tower import Tower

__all__ = ["Contribution", "LossSum", "Losses", "NamedCounts", "loss_sum"]


@dataclass(frozen=True)
class LossSum:
    """A sum over tokens, pixels or the like; the loss function of a `Step` may return it instead of a mean.

    The step's loss is the sum of all towers' totals, divided once by the sum of all their counts.

    Attributes:
        total: the sum, a scalar that requires grad; it need not require grad if the count is 0.
        count: the number of terms in the sum, such as tokens or pixels: a number or 0-dim tensor.

    Example:
        >>> from samestep import Step, Towers
        >>> model, words = torch.nn.Embedding(9, 1), torch.tensor([[3, 1, 0], [4, 0, 0]])  # 0 is padding
        >>> def loss_fn(model, words):
        ...     return LossSum(model(words).squeeze(-1)[words > 0].square().sum(), (words > 0).sum())
        >>> Step(Towers(model, 2), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))(words).count
        3.0
    """

    total: Tensor
    count: float | Tensor


@dataclass(frozen=True)
class Contribution:
    """A tower's loss and count, in units of a power of two (see `Losses`)."""

    total: Tensor  # 0-dim, float32 or float64: backward starts here
    sums: Tensor  # [K], without a graph: one for each name, or one if there are no names
    count: float | Tensor


class Losses:
    """Converts the losses of a step's towers to sums and counts.

    Their unit is the largest power of two that is at most the batch's rows. Scaling by it is exact. It keeps
    sums of gradients at the size of means, which float16 needs, and the divisor is 1 if the number of rows is
    a power of two. A loss of the whole batch is not a sum over rows; its unit is 1.

    Attributes:
        unit: see above.
        named: the counts of named sums; None if the loss is one sum without a name.
        has_count: whether some tower of this worker has a count above 0; counts on a GPU are not read.
    """

    def __init__(self, rows: int, *, is_whole_batch: bool) -> None:
        self.unit = 1 if is_whole_batch else 1 << (rows.bit_length() - 1)
        self.named: NamedCounts | None = None
        self.has_count = False

    def from_mean(self, tower: Tower, loss: Tensor | Mapping[str, Tensor]) -> Contribution:
        """Return the contribution of a tower's mean loss, or of its named sums; see `Tower.backward`."""
        share = tower.rows / self.unit
        if self.named is not None:
            return self.named.loss_sum(repr(tower), loss, tower._index, share, self.unit)
        if isinstance(loss, Mapping):
            raise UsageError(
                f"{tower!r}: loss is a mapping, but the step was started without counts: start it with "
                "towers(batch, counts={name: count, ...}), or Step(..., counts=...)"
            )
        return loss_sum(f"{tower!r}: loss", loss, share, share)

    def from_sum(self, tower: Tower, total: Tensor, count: float | Tensor) -> Contribution:
        """Return the contribution of a tower's summed loss; see `Tower.backward_sum`."""
        if self.named is not None:
            raise UsageError(
                f"{tower!r}: backward_sum cannot be used in a step that was started with counts; call "
                "tower.backward({name: sum})"
            )
        if isinstance(count, Tensor) and count.numel() != 1:
            raise UsageError(f"{tower!r}: count has shape {tuple(count.shape)}, expected one number")
        if not isinstance(count, (int, float, Tensor)):
            raise UsageError(f"{tower!r}: count is {count!r}, expected a number or 0-dim tensor")
        if isinstance(count, Tensor) and count.requires_grad:
            raise UsageError(
                f"{tower!r}: count requires grad: expected the number that the sum is divided by, such as a "
                "number of tokens; if a loss has several terms, pass their sum"
            )
        return loss_sum(f"{tower!r}: total", total, 1 / self.unit, count / self.unit)

    def note(self, loss: Contribution) -> None:
        """Update `has_count` with a tower's contribution."""
        self.has_count |= _is_known_to_count(loss.count)

    def of_all(self, scalars: Scalars) -> tuple[Tensor, Tensor]:
        """Return the loss sums and the counts of all towers, each [T, K]; see `Report`."""
        counts = scalars.counts[:, None] * self.unit
        if self.named is not None:
            counts = self.named.counts.to(counts.device)
        return scalars.loss_sums * self.unit, counts


def loss_sum(what: str, loss: Tensor, factor: float, count: float | Tensor) -> Contribution:
    """Return the contribution `loss * factor` with this count."""
    if not isinstance(loss, Tensor) and isinstance(loss, (int, float)) and float(count) == 0:
        loss = torch.tensor(float(loss), dtype=torch.float32, device="cpu")
    _check_scalar(what, loss)
    # A sum over nothing may be a constant, without a graph.
    if not loss.requires_grad and float(count) != 0:
        raise UsageError(
            f"{what} does not require grad: expected one that is computed from the model's outputs, without "
            "detach() and torch.no_grad()"
        )
    total = _at_least_float32(loss) * factor
    return Contribution(total, total.detach().reshape(1), count)


def _is_known_to_count(count: float | Tensor) -> bool:
    """Whether a count is above 0; False for a count on a GPU, because reading it would wait."""
    return (not isinstance(count, Tensor) or count.device.type == "cpu") and float(count) > 0


@dataclass(frozen=True)
class NamedCounts:
    r"""The counts of each named sum of a loss in every tower, computed before the first pass.

    With :math:`S_{kt}` and :math:`N_{kt}` the sum and the count of name k in tower t, the loss is

    .. math:: L = \sum_k \frac{\sum_t S_{kt}}{\sum_t N_{kt}}

    over the names whose total count :math:`N_k` is above 0. A tower contributes
    :math:`R \sum_k S_{kt} / N_k`, and its rows as the count; R is the number of rows of the batch.
    """

    names: tuple[str, ...]
    counts: Tensor  # float64 [T, K], on the CPU
    rows: int  # R

    @cached_property
    def totals(self) -> list[float]:
        """The count of each name over all towers."""
        totals: list[float] = self.counts.sum(0).tolist()
        return totals

    def of_tower(self, tower: int) -> dict[str, float]:
        """Return a tower's counts, by name."""
        return dict(zip(self.names, self.counts[tower].tolist(), strict=True))

    def loss_sum(self, who: str, losses: Any, tower: int, share: float, unit: int) -> Contribution:
        """Return the contribution of a tower with `share` of `unit` rows."""
        sums = self._in_order(who, losses)
        # Added in the order of `names`, so that the bits are the same on every worker.
        means = [s * (self.rows / (n * unit)) for s, n in zip(sums, self.totals, strict=True) if n > 0]
        total = reduce(torch.add, means)
        if not total.requires_grad and bool(self.counts[tower].any()):
            raise UsageError(
                f"{who}: none of the sums requires grad: expected sums that are computed from the model's "
                "outputs, without detach() and torch.no_grad()"
            )
        return Contribution(total, torch.stack([s.detach().double() for s in sums]) / unit, share)

    def _in_order(self, who: str, losses: Any) -> list[Tensor]:
        expected = ", ".join(self.names)
        if not isinstance(losses, Mapping):
            raise UsageError(
                f"{who}: loss is a {type(losses).__name__}, expected a mapping with a sum for each name in "
                f"counts: {expected}"
            )
        if set(losses) != set(self.names):
            raise UsageError(
                f"{who}: loss has sums for {', '.join(map(str, losses)) or 'nothing'}, expected one for "
                f"each name in counts: {expected}"
            )
        for name in self.names:
            _check_scalar(f"{who}: loss[{name!r}]", losses[name])
        return [_at_least_float32(losses[name]).reshape(()) for name in self.names]


def _check_scalar(what: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        hint = "; for a sum and its count, call tower.backward_sum(total, count)"
        raise UsageError(
            f"{what} is a {type(value).__name__}, expected a scalar tensor{hint * isinstance(value, tuple)}"
        )
    if value.is_complex():
        raise UsageError(f"{what} is complex, expected a real number")
    if value.numel() != 1:
        raise UsageError(
            f"{what} has shape {tuple(value.shape)}, expected a scalar, as mean() or sum() returns"
        )


def _at_least_float32(loss: Tensor) -> Tensor:
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
