"""Where a gradient that is not finite came from: which towers, rows and parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.summation.placement import even_ranges
from samestep.summation.sparse import coalesced, stored
from samestep.towers.report import Report
from samestep.towers.run import Tower
from samestep.towers.towers import Towers

__all__ = ["explain", "explain_whole", "first_nonfinite"]

_NONE = -1
_MAX_TOWERS = 4


def first_nonfinite(towers: Towers, run: Callable[[Tower], None]) -> list[str | None]:
    """Run the towers of the last step again, and look at each one's own gradient.

    All workers must call this, and all get the same answer. Weights and `p.grad` stay as they are; the
    buffers get their values from before the step.

    Args:
        towers: their last step is looked at; the weights must be those that it began with.
        run: runs one tower: forward, and `tower.backward(loss)`.

    Returns:
        For each of the T towers the name of its first parameter, in the model's order, with a gradient
        that is not finite; None where all are, and where the tower had no rows.
    """
    mine = towers.placement.towers(towers.job.rank)
    found = torch.full((len(mine), 1), _NONE)
    averaged = [parameter.grad for parameter in towers.parameters]
    try:
        _clear(towers.parameters)
        # Whatever goes wrong in here must not hide what is being explained.
        with contextlib.suppress(Exception), contextlib.closing(towers.replay()) as turns:
            for tower in turns:
                run(tower)
                found[tower.index - mine.start] = _first(towers.parameters)
                _clear(towers.parameters)
    finally:
        for parameter, gradient in zip(towers.parameters, averaged, strict=True):
            parameter.grad = gradient
    names = [name for name, parameter in towers.model.named_parameters() if parameter.requires_grad]
    return [names[index] if index != _NONE else None for index in towers.gather(found)[:, 0].tolist()]


def explain(report: Report, parameters: Sequence[str | None]) -> str:
    """Say, in one line, where an averaged gradient that is not finite came from.

    Args:
        report: of the step.
        parameters: each tower's first parameter with a gradient that is not finite, if any.
    """
    ranges = even_ranges(report.rows, len(parameters))
    towers = list(zip(ranges, report.tower_losses, parameters, strict=True))
    bad = [
        _describe(tower, *each)
        for tower, each in enumerate(towers)
        if each[2] is not None or (each[0] and not math.isfinite(each[1]))
    ]
    where = "; ".join(bad[:_MAX_TOWERS]) + f"; and {len(bad) - _MAX_TOWERS} more" * (len(bad) > _MAX_TOWERS)
    nowhere = "the loss and the gradient of each tower are finite"
    return (
        f"step {report.step}: the averaged gradient is not finite ({where or nowhere}); nothing was updated"
    )


def explain_whole(report: Report) -> str:
    """Say that the averaged gradient of a loss of the whole batch is not finite."""
    return (
        f"step {report.step}: the averaged gradient is not finite (the loss of the whole batch, "
        f"{report.rows} rows, is {report.loss:g}); nothing was updated"
    )


def _describe(tower: int, rows: range, loss: float, parameter: str | None) -> str:
    text = f"tower {tower}, rows {rows.start} to {rows.stop - 1}, loss {loss:g}"
    return text if parameter is None else f"{text}, first in the gradient of {parameter}"


def _first(parameters: Sequence[Tensor]) -> int:
    """Return the index of the first gradient that is not finite."""
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and not bool(stored(coalesced(gradient)).isfinite().all()):
            return index
    return _NONE


def _clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None
