"""What a tower's loss is a sum of, and what the sums of all towers are divided by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from samestep.errors import BatchError, ConfigError, UsageError

__all__ = [
    "Count",
    "LossSum",
    "NamedCounts",
    "check_counts",
    "count_slices",
    "is_known_to_count",
    "loss_sum",
    "wrong_counts",
]

Count = Callable[[Any], "float | Tensor"]
"""count(tower_batch) -> what a tower's sum is divided by, such as its valid tokens: a number or 0-dim tensor,
at least 0."""


@dataclass(frozen=True)
class LossSum:
    """What a tower hands in, in units of a power of two (see `StepRun`)."""

    total: Tensor  # 0-dim, float32 or float64: what backward starts from
    sums: Tensor  # [K], without graph: one for each name, or one where there are no names
    count: float | Tensor


def loss_sum(what: str, loss: Tensor, factor: float, count: float | Tensor) -> LossSum:
    """Return `loss * factor` and what it counts."""
    if not isinstance(loss, Tensor) and isinstance(loss, (int, float)) and float(count) == 0:
        loss = torch.tensor(float(loss), dtype=torch.float32)
    _check_scalar(what, loss)
    # A sum over nothing may be a constant; then there is nothing to run backward through.
    if not loss.requires_grad and float(count) != 0:
        raise UsageError(f"{what} does not require grad, so it has no gradient")
    total = _at_least_float32(loss) * factor
    return LossSum(total, total.detach().reshape(1), count)


def is_known_to_count(count: float | Tensor) -> bool:
    """Whether a count is above 0; False where only a GPU knows."""
    return (not isinstance(count, Tensor) or count.device.type == "cpu") and float(count) > 0


def wrong_counts(step: int, names: Sequence[str], counts: Tensor, has_count: bool) -> BatchError | None:
    """Return what is wrong with the towers' counts, float64 [T], alike on every worker.

    `has_count` says whether some tower of this worker is known to count something.
    """
    if counts.device.type == "cpu":  # a GPU would be waited for; there the average is not finite
        wrong = _first_wrong(counts)
        if wrong is not None:
            return BatchError(
                f"step {step}: tower {wrong[0]} has the count {float(counts[wrong[0]]):g}, expected a finite "
                "number of at least 0; nothing was updated"
            )
    # Nor is one waited for where a count here is known to be above 0. If all are 0, none is, and all workers
    # look; if not, it does not matter who looks.
    if has_count or float(counts.sum()) != 0:
        return None
    what = f"the towers' counts of {', '.join(names)}" if names else "the towers' counts"
    return BatchError(
        f"step {step}: {what} add up to 0, so there is nothing to average, and nothing was updated; leave "
        "such batches out, or use Towers(..., on_zero_count='skip')"
    )


@dataclass(frozen=True)
class NamedCounts:
    r"""What each of several sums of a loss counts, in every tower, known before the first pass.

    With :math:`S_{kt}` and :math:`N_{kt}` the sum and the count of name k in tower t, the loss is

    .. math:: L = \sum_k \frac{\sum_t S_{kt}}{\sum_t N_{kt}}

    over the names that count something. A tower hands in :math:`R \sum_k S_{kt} / N_k` and counts its rows,
    of which there are R in all.
    """

    names: tuple[str, ...]
    counts: Tensor  # float64 [T, K], on the CPU
    rows: int  # R

    @cached_property
    def totals(self) -> list[float]:
        """Each name's count over all towers."""
        totals: list[float] = self.counts.sum(0).tolist()
        return totals

    def loss_sum(self, who: str, losses: Any, tower: int, share: float, unit: int) -> LossSum:
        """Return what a tower hands in that has `share` of `unit` rows."""
        sums = self._in_order(who, losses)
        # In this order on every worker, so that the bits are the same.
        means = [s * (self.rows / (n * unit)) for s, n in zip(sums, self.totals, strict=True) if n > 0]
        total = reduce(torch.add, means)
        if not total.requires_grad and bool(self.counts[tower].any()):
            raise UsageError(f"{who}: no sum requires grad, so it has no gradient")
        return LossSum(total, torch.stack([s.detach().double() for s in sums]) / unit, share)

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


def check_counts(counts: Mapping[str, Count] | None) -> tuple[str, ...]:
    """Return the names of the sums, none for a loss that is one sum."""
    if counts is None:
        return ()
    if not isinstance(counts, Mapping) or not counts or not all(map(callable, counts.values())):
        raise ConfigError(
            f"counts = {counts!r}: expected a mapping from the name of each sum to a function that counts, "
            "count(tower_batch) -> number"
        )
    return tuple(counts)


def count_slices(
    counts: Mapping[str, Count], towers: range, slices: Mapping[int, Any], device: torch.device
) -> Tensor:
    """Return what each of a worker's towers counts, float64 [towers, names] on the CPU; 0 without rows."""
    table = torch.zeros(len(towers), len(counts), dtype=torch.float64)
    for tower, batch in slices.items():
        # Gathered on the device, so that a GPU is waited for once a tower.
        values = [torch.as_tensor(count(batch), device=device).detach() for count in counts.values()]
        for name, value in zip(counts, values, strict=True):
            if value.numel() != 1:
                shape = tuple(value.shape)
                raise BatchError(f"tower {tower}: the count of {name} has shape {shape}, expected one number")
        table[tower - towers.start] = torch.stack([value.reshape(()).double() for value in values]).cpu()
    wrong = _first_wrong(table)
    if wrong is not None:
        row, column = wrong
        raise BatchError(
            f"tower {towers.start + row}: the count of {list(counts)[column]} is {table[row, column]:g}, "
            "expected a finite number of at least 0"
        )
    return table


def _first_wrong(counts: Tensor) -> list[int] | None:
    """Return the index of the first count that is negative or not finite."""
    if all(0 <= count < math.inf for count in counts.flatten().tolist()):  # few: five kernels take longer
        return None
    wrong: list[list[int]] = (~(counts >= 0) | counts.isinf()).nonzero().tolist()
    return wrong[0]


def _check_scalar(what: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        hint = "; for a sum and what it counts, call tower.backward_sum(total, count)"
        raise UsageError(
            f"{what} is a {type(value).__name__}, expected a scalar tensor{hint * isinstance(value, tuple)}"
        )
    if value.is_complex():
        raise UsageError(f"{what} is complex, expected a real number")
    if value.numel() != 1:
        raise UsageError(f"{what} has shape {tuple(value.shape)}, expected a scalar")


def _at_least_float32(loss: Tensor) -> Tensor:
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
