"""Counts, such as valid tokens: the sums of a loss over all towers are divided by the sums of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.errors import BatchError, ConfigError, UsageError, shown
from samestep.streams import keep_globals, seed_globals

__all__ = ["Count", "check_counts", "count_slices", "wrong_counts"]

Count = Callable[[Any], "float | Tensor"]
"""count(tower_batch) -> what a tower's sum counts, such as its valid tokens: a number or 0-dim tensor, at
least 0."""


def wrong_counts(step: int, names: Sequence[str], counts: Tensor, has_count: bool) -> BatchError | None:
    """Return an error if the towers' counts, float64 [T], are wrong; the same on every worker.

    `has_count` says whether some tower of this worker is known to have a count above 0.
    """
    if counts.device.type == "cpu":  # reading them from a GPU would wait
        wrong = _first_wrong(counts)
        if wrong is not None:
            return BatchError(
                f"step {step}: tower {wrong[0]} has the count {float(counts[wrong[0]]):g}, expected a finite "
                "number of at least 0; nothing was updated"
            )
    # Reading the sum may wait for a GPU, so a worker that knows of a count above 0 does not read it. If the
    # sum is 0, there is no such worker, so all workers return the same.
    if has_count or float(counts.sum()) != 0:
        return None
    what = f"the towers' counts of {', '.join(names)}" if names else "the towers' counts"
    return BatchError(
        f"step {step}: {what} add up to 0, so there is nothing to average, and nothing was updated; skip "
        "such batches, or use Towers(..., on_zero_count='skip')"
    )


def check_counts(counts: Mapping[str, Count] | None) -> tuple[str, ...]:
    """Return the names of the sums; none if the loss is one sum without a name."""
    if counts is None:
        return ()
    if not isinstance(counts, Mapping) or not counts or not all(map(callable, counts.values())):
        raise ConfigError(
            f"counts = {counts!r}: expected a mapping from the name of each sum to a function that counts, "
            "count(tower_batch) -> number"
        )
    return tuple(counts)


def count_slices(
    counts: Mapping[str, Count],
    towers: range,
    slices: Mapping[int, Any],
    device: torch.device,
    *,
    seed_of: Callable[[int], int],
    counts_twice: bool,
) -> Tensor:
    """Return the counts of a worker's towers, float64 [towers, names] on the CPU; 0 for towers without rows.

    `seed_of` returns the seed of a tower's random streams. With `counts_twice`, the first tower is counted
    twice, to check that counts depend only on its rows, seed and weights.
    """
    table = torch.zeros(len(towers), len(counts), dtype=torch.float64, device="cpu")
    with keep_globals(device):
        for number, tower in enumerate(slices):
            seed = seed_of(tower)
            table[tower - towers.start] = found = _count(counts, tower, slices[tower], device, seed)
            if counts_twice and number == 0:
                _check_same(counts, tower, found, _count(counts, tower, slices[tower], device, seed))
    wrong = _first_wrong(table)
    if wrong is not None:
        row, column = wrong
        raise BatchError(
            f"tower {towers.start + row}: the count of {list(counts)[column]} is {table[row, column]:g}, "
            "expected a finite number of at least 0"
        )
    return table


def _count(counts: Mapping[str, Count], tower: int, batch: Any, device: torch.device, seed: int) -> Tensor:
    seed_globals(seed, device)
    # Stacked on the device, so that a GPU is waited for only once per tower.
    values = [
        _as_number(f"tower {tower}: the count of {name}", count(batch), device)
        for name, count in counts.items()
    ]
    return torch.stack([value.reshape(()).double() for value in values]).cpu()


def _as_number(what: str, value: Any, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(value, device=device).detach()
    except (TypeError, ValueError, RuntimeError):  # torch has no error type of its own for this
        raise BatchError(f"{what} is {shown(value)}, expected a number or 0-dim tensor") from None
    if found.numel() != 1:
        raise BatchError(f"{what} has shape {tuple(found.shape)}, expected one number")
    if found.is_complex():
        raise BatchError(f"{what} is complex, expected a real number")
    return found


def _check_same(counts: Mapping[str, Count], tower: int, found: Tensor, again: Tensor) -> None:
    for name, first, second in zip(counts, found.tolist(), again.tolist(), strict=True):
        if first != second and not math.isnan(first):
            raise UsageError(
                f"tower {tower}: the count of {name} is {first:g}, but {second:g} when counted again: "
                "expected it to depend only on the tower's rows and the weights; the global generators are "
                "seeded for each tower"
            )


def _first_wrong(counts: Tensor) -> list[int] | None:
    """Return the index of the first count that is negative or not finite."""
    if all(0 <= count < math.inf for count in counts.flatten().tolist()):  # faster than five kernels
        return None
    wrong: list[list[int]] = (~(counts >= 0) | counts.isinf()).nonzero().tolist()
    return wrong[0]
