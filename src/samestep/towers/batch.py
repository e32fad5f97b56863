"""A batch: nested tensors, rows first. Counting its rows and cutting it into towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import BatchError
from samestep.summation.placement import Placement
from samestep.towers.batch_fingerprint import fingerprint
from samestep.towers.columns import Branch, Column, Node, Whole, columns, parse, resolved
from samestep.towers.nest import mapped, rebuilt, tensors
from samestep.workers.job import Job

__all__ = ["GlobalBatch", "LocalBatch", "copied", "cut", "moved"]


@dataclass(frozen=True)
class LocalBatch:
    """One worker's part of a global batch, already cut into its towers.

    Attributes:
        rows: rows of the global batch.
        slices: from tower index to the tower's batch, for this worker's towers that have rows.
        position: which batch of the run this is.
        fingerprint: a 32-bit number that workers compare, to see that they have the same batch.

    Example:
        >>> from samestep import TowerLoader, Towers
        >>> batch = next(iter(TowerLoader([5, 6, 7], 3, Towers(torch.nn.Linear(1, 1), 2), shuffle=False)))
        >>> batch.rows, batch.slices
        (3, {0: tensor([5, 6]), 1: tensor([7])})
    """

    rows: int
    slices: Mapping[int, Any]
    position: int = 0
    fingerprint: int = 0

    def to(self, device: torch.device) -> LocalBatch:
        """Return the same batch with its tensors on a device."""
        return replace(self, slices={tower: moved(batch, device) for tower, batch in self.slices.items()})


@dataclass(frozen=True)
class GlobalBatch:
    """A whole batch taken apart.

    Attributes:
        root: what is in it.
        rows: how many, the same in all columns.
    """

    root: Node
    rows: int

    @classmethod
    def open(cls, batch: Any) -> GlobalBatch:
        """Take a nest apart and count its rows.

        Raises:
            BatchError: nothing in the nest has rows, something cannot be cut, or numbers of rows differ.
        """
        root = parse(batch)
        rows = _rows(root)
        if rows is None:  # nothing but lists that can be read in two ways: each must be readable in one
            root = resolved(root, None)
            rows = _rows(root)
        if rows is None:
            raise BatchError(
                f"batch is a {type(batch).__name__} without tensors, arrays or lists with one entry a row: "
                "expected a nest of them"
            )
        root = resolved(root, rows)
        _check_rows(list(columns(root)))
        return cls(root, rows)

    def take(self, rows: range, device: torch.device) -> Any:
        """Copy some rows of each column, tensors to a device, nested as before.

        It is a copy even there, because a view may start at any address, and kernels may choose by
        alignment.
        """
        return _taken(self.root, slice(rows.start, rows.stop), device)

    def fingerprint(self) -> int:
        """Return a 32-bit number that tells batches apart; see `batch_fingerprint`."""
        return fingerprint(self.root)


def cut(batch: Any, placement: Placement, job: Job) -> LocalBatch:
    """Cut a global batch into this worker's towers, or check one that has been cut already.

    Raises:
        BatchError: numbers of rows disagree, there are none, something cannot be cut, or a `LocalBatch` is
            another worker's.
    """
    if isinstance(batch, LocalBatch):
        local = batch.to(job.device)
        _check_slices(local, placement, job)
    else:
        whole = GlobalBatch.open(batch)
        mine = placement.rows(job.rank, whole.rows)
        number = whole.fingerprint() if job.world_size > 1 else 0
        slices = {tower: whole.take(mine[tower], job.device) for tower in mine}
        local = LocalBatch(whole.rows, slices, fingerprint=number)
    if local.rows == 0:
        raise BatchError("the batch has no rows")
    return local


def _check_slices(local: LocalBatch, placement: Placement, job: Job) -> None:
    expected = list(placement.rows(job.rank, local.rows))
    if list(local.slices) != expected:
        raise BatchError(
            f"the batch holds towers {list(local.slices)}, but this worker runs {expected} of "
            f"{placement.num_towers}: create the TowerLoader with the same Towers"
        )


def _rows(root: Node) -> int | None:
    """Return the rows of the first column: of a tensor or an array, where there is one."""
    found = min(columns(root), key=lambda column: column.is_sequence, default=None)
    return None if found is None else found.rows


def _check_rows(found: list[Column]) -> None:
    first = min(found, key=lambda column: column.is_sequence)
    other = next((column for column in found if column.rows != first.rows), None)
    if other is None:
        return
    if other.is_sequence:
        raise BatchError(
            f"{other.path} is a {type(other.value).__name__} of {other.rows} entries, {first.path} has "
            f"{first.rows} rows: expected one entry a row; samestep.Whole({other.path}) is given to every "
            "tower as it is"
        )
    raise BatchError(
        f"{other.path} has {other.rows} rows, {first.path} has {first.rows}: "
        "expected the same number of rows in all tensors of a batch"
    )


def _taken(node: Node, rows: slice, device: torch.device) -> Any:
    if isinstance(node, Branch):
        return rebuilt(node.nest, {key: _taken(child, rows, device) for key, child in node.children.items()})
    assert isinstance(node, Column | Whole)
    if isinstance(node, Whole):
        return _whole_on(node.value, device)
    part = node.value[rows]
    if isinstance(part, Tensor):
        return part.to(device, copy=True)
    return part if node.is_sequence else copied(part)


def _whole_on(value: Any, device: torch.device) -> Any:
    elsewhere = [each for each in tensors(value) if isinstance(each, Tensor) and each.device != device]
    return moved(value, device) if elsewhere else value


def moved(value: Any, device: torch.device) -> Any:
    """Return a nest with its tensors on a device, without copying those that are there."""
    return mapped(
        lambda each: each.to(device, non_blocking=True) if isinstance(each, Tensor) else each, value
    )


def copied(array: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    """Copy a tensor or an array; the memory of both starts at the same alignment in every process."""
    if isinstance(array, Tensor):
        return array.clone()
    if type(array) is not np.ndarray or array.dtype.hasobject or not array.nbytes:
        return array.copy()
    own = torch.empty(array.nbytes, dtype=torch.uint8).numpy().view(array.dtype).reshape(array.shape)
    own[...] = array
    return own
