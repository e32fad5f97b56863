"""What a tower's loss is a sum of, and what the sums of all towers are divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from samestep.errors import BatchError, ConfigError, UsageError
from samestep.towers.tower import Loss, Tower

__all__ = [
    "Count",
    "LossSum",
    "NamedWeights",
    "count_slices",
    "is_known_to_count",
    "names_of",
    "nothing_counts",
    "weigh",
    "wrong_weight",
]

Count = Callable[[Any], "float | Tensor"]
"""count(tower_batch) -> how much of something a tower's rows hold, at least 0: a number or 0-dim tensor."""


@dataclass(frozen=True)
class LossSum:
    """What a tower hands in, in units of a power of two (see `Towers`).

    Attributes:
        total: 0-dim, float32 or float64: what backward starts from.
        sums: [K], without graph: one for each name, or one where there are no names.
        weight: how much the tower counts.
    """

    total: Tensor
    sums: Tensor
    weight: float | Tensor


def weigh(tower: Tower, loss: Loss, weight: float | Tensor | None, unit: int) -> LossSum:
    """Return the sum that a loss stands for: a mean over the tower's rows, or a sum over `weight` things.

    Raises:
        UsageError: `loss` is not a scalar that requires grad, or `weight` not one number.
    """
    if isinstance(loss, Mapping):
        raise UsageError(
            f"{tower!r}: loss is a mapping, but nobody said what its sums count; "
            "start the step with towers(batch, weights={name: count, ...}), or Step(..., weights=...)"
        )
    _check_scalar(tower, "loss", loss)
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise UsageError(f"{tower!r}: weight has shape {tuple(weight.shape)}, expected one number")
    # A sum over nothing may be a constant; then there is nothing to run backward through.
    if not loss.requires_grad and (weight is None or float(weight) != 0):
        raise UsageError(f"{tower!r}: loss does not require grad, so there is nothing to hand in")
    total = _at_least_float32(loss) * ((tower.rows if weight is None else 1) / unit)
    return LossSum(total, total.detach().reshape(1), (tower.rows if weight is None else weight) / unit)


def is_known_to_count(weight: float | Tensor) -> bool:
    """Whether a weight is above 0, as far as can be told without waiting for a GPU."""
    return (not isinstance(weight, Tensor) or weight.device.type == "cpu") and float(weight) > 0


def nothing_counts(step: int, names: Sequence[str]) -> BatchError:
    """Return the error of a step whose weights add up to 0."""
    what = f"the towers' counts of {', '.join(names)}" if names else "the towers' weights"
    return BatchError(
        f"step {step}: {what} add up to 0, so there is nothing to average, and nothing was updated; leave "
        "such batches out, or make Towers with on_zero_weight='skip'"
    )


def wrong_weight(step: int, weights: Tensor) -> BatchError | None:
    """Return the error of a step in which a tower's weight is negative or not finite; float64 [T]."""
    wrong = (~(weights >= 0) | weights.isinf()).nonzero()
    if not len(wrong):
        return None
    tower = int(wrong[0])
    return BatchError(
        f"step {step}: tower {tower} has the weight {float(weights[tower]):g}, expected a finite number "
        "of at least 0; nothing was updated"
    )


# ---- several sums ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedWeights:
    r"""What each of several sums of a loss counts, in every tower, known before the first pass.

    With :math:`S_{kt}` and :math:`W_{kt}` the sum and the count of name k in tower t, the loss is

    .. math:: L = \sum_k \frac{\sum_t S_{kt}}{\sum_t W_{kt}}

    over the names that count something. A tower hands in :math:`R \sum_k S_{kt} / W_k` and weighs its rows,
    of which there are R in all.

    Attributes:
        names: of the sums, K of them.
        counts: float64 [T, K], on the CPU.
        rows: R.
    """

    names: tuple[str, ...]
    counts: Tensor
    rows: int

    @cached_property
    def totals(self) -> list[float]:
        """Each name's count over all towers."""
        totals: list[float] = self.counts.sum(0).tolist()
        return totals

    def weigh(self, tower: Tower, losses: Loss, weight: float | Tensor | None, unit: int) -> LossSum:
        """Return what a tower hands in.

        Raises:
            UsageError: `losses` has other names, or holds something else than scalars; none of them
                requires grad although the tower counts; or there is a `weight`.
        """
        if weight is not None:
            raise UsageError(f"{tower!r}: weight has no effect in a step that began with weights")
        sums = self._in_order(tower, losses)
        used = [(s, total) for s, total in zip(sums, self.totals, strict=True) if total > 0]
        # In this order on every worker, so that the bits are the same.
        parts = [s * (self.rows / (total * unit)) for s, total in used]
        total = reduce(torch.add, parts)
        if not total.requires_grad and bool(self.counts[tower.index].any()):
            raise UsageError(f"{tower!r}: no sum requires grad, so there is nothing to hand in")
        return LossSum(total, torch.stack([s.detach().double() for s in sums]) / unit, tower.rows / unit)

    def _in_order(self, tower: Tower, losses: Loss) -> list[Tensor]:
        expected = ", ".join(self.names)
        if not isinstance(losses, Mapping):
            raise UsageError(
                f"{tower!r}: loss is a {type(losses).__name__}, expected a mapping with a sum for each of "
                f"weights: {expected}"
            )
        if set(losses) != set(self.names):
            raise UsageError(
                f"{tower!r}: loss has sums for {', '.join(map(str, losses)) or 'nothing'}, expected one for "
                f"each of weights: {expected}"
            )
        for name in self.names:
            _check_scalar(tower, f"loss[{name!r}]", losses[name])
        return [_at_least_float32(losses[name]).reshape(()) for name in self.names]


def names_of(weights: Mapping[str, Count] | None) -> tuple[str, ...]:
    """Return the names of the sums, none for a loss that is one sum.

    Raises:
        ConfigError: `weights` is no mapping of functions, or is empty.
    """
    if weights is None:
        return ()
    if not isinstance(weights, Mapping) or not weights or not all(map(callable, weights.values())):
        raise ConfigError(
            f"weights = {weights!r}: expected a mapping from the name of each sum to a function that counts, "
            "count(tower_batch) -> number"
        )
    return tuple(weights)


def count_slices(
    weights: Mapping[str, Count], towers: range, slices: Mapping[int, Any], device: torch.device
) -> Tensor:
    """Return what each of a worker's towers counts, float64 [towers, names] on the CPU; 0 without rows.

    Raises:
        BatchError: a count is not a finite number of at least 0.
    """
    table = torch.zeros(len(towers), len(weights), dtype=torch.float64)
    for tower, batch in slices.items() if weights else ():
        # Gathered on the device, so that a GPU is waited for once a tower.
        counts = [torch.as_tensor(count(batch), device=device).detach() for count in weights.values()]
        for name, value in zip(weights, counts, strict=True):
            if value.numel() != 1:
                raise BatchError(f"tower {tower}: {name} counts {tuple(value.shape)}, expected one number")
        table[tower - towers.start] = torch.stack([value.reshape(()).double() for value in counts]).cpu()
    wrong = (~(table >= 0) | table.isinf()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise BatchError(
            f"tower {towers.start + row}: {list(weights)[column]} counts {table[row, column]:g}, expected a "
            "finite number of at least 0"
        )
    return table


# ---- checks ----------------------------------------------------------------------------------------


def _check_scalar(tower: Tower, name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise UsageError(f"{tower!r}: {name} has shape {tuple(value.shape)}, expected a scalar")


def _at_least_float32(loss: Tensor) -> Tensor:
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
