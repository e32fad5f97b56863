"""Warns of batches that give a tower a single row, which has no variance for batch norm."""

from __future__ import annotations

from torch import nn

from samestep.errors import warn
from samestep.identity import uncompiled
from samestep.summation.placement import even_ranges

__all__ = ["warn_of_single_rows"]

_LAYERS = (nn.BatchNorm1d, nn.LazyBatchNorm1d)
"""Layers that normalise over rows alone; the 2d and 3d ones also normalise over positions."""


def warn_of_single_rows(
    model: nn.Module, num_towers: int, *, examples: int, batch_size: int, drop_last: bool
) -> None:
    """Warn if a batch gives some tower one row while a layer in training mode normalises over rows."""
    named = uncompiled(model).named_modules(prefix="model")
    layer = next((name for name, layer in named if isinstance(layer, _LAYERS) and layer.training), None)
    last = 0 if drop_last else examples % batch_size
    for rows in (min(examples, batch_size), last):
        single = sum(len(part) == 1 for part in even_ranges(rows, num_towers))
        if layer is not None and single:
            which = "the last batch of an epoch" if rows == last else "a batch"
            num_rows = "1 row" if rows == 1 else f"{rows} rows"
            remedies = [
                *(["drop_last=True"] if rows == last < examples else []),
                "another batch_size",
                *([f"at most {rows // 2} towers"] if rows > 1 else []),
            ]
            warn(
                f"{which} has {num_rows}, and {single} of {num_towers} towers get only one, which "
                f"BatchNorm1d ({layer}) refuses as [1, features]: use {' or '.join(remedies)}"
            )
            return
