"""Finds the towers, rows and parameters that made an averaged gradient non-finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.summation.sparse import coalesced, stored
from samestep.towers.report import Report
from samestep.towers.tower import Tower
from samestep.towers.towers import Towers

__all__ = ["explain", "first_nonfinite"]

_NONE = -1
_MAX_TOWERS = 4


def first_nonfinite(towers: Towers, run_tower: Callable[[Tower], None]) -> list[str | None]:
    """Run the last step's passes again; return each tower's first parameter whose gradient is not finite.

    All workers must call this, with the weights that the step began with; all return the same. Weights and
    `p.grad` do not change; the buffers get their values from before the step.
    """
    run = towers._last.run
    found = torch.full((len(run.own_towers), 1), _NONE, device="cpu")
    # An error in the repeated passes must not hide the error that is being explained.
    with contextlib.suppress(Exception), contextlib.closing(towers._replay()) as turns:
        for tower in turns:
            run_tower(tower)
            found[tower._index - run.own_towers.start] = _first(run.parameters)
    indices = run.gather(found, "towers")[:, 0].tolist()
    return [None if index == _NONE else run.plan.parameters[index].name for index in indices]


def explain(report: Report, parameters: Sequence[str | None] | None, ranges: Sequence[range]) -> str:
    """Return an error message that says where a non-finite averaged gradient came from.

    `parameters` is what `first_nonfinite` returned, or None after a loss of the whole batch. `ranges` has
    each tower's rows.
    """
    if parameters is None:
        where = f"the loss of the whole batch, {report.rows} rows, is {report.loss:g}"
    else:
        bad = _bad_towers(report, parameters, ranges)
        where = "; ".join(bad[:_MAX_TOWERS]) or "the loss and the gradient of each tower are finite"
        if len(bad) > _MAX_TOWERS:
            where += f"; and {len(bad) - _MAX_TOWERS} more"
    return f"step {report.step}: the averaged gradient is not finite ({where}); nothing was updated"


def _bad_towers(report: Report, parameters: Sequence[str | None], ranges: Sequence[range]) -> list[str]:
    bad = []
    for tower, (rows, loss, name) in enumerate(zip(ranges, report.tower_losses, parameters, strict=True)):
        if name is not None or (rows and not math.isfinite(loss)):
            text = f"tower {tower}, rows {rows.start} to {rows.stop - 1}, loss {loss:g}"
            bad.append(text if name is None else f"{text}, first in the gradient of {name}")
    return bad


def _first(parameters: Sequence[Tensor]) -> int:
    """Return the index of the first gradient that is not finite."""
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and not bool(stored(coalesced(gradient)).isfinite().all()):
            return index
    return _NONE
