"""A batch: nested tensors with rows along the first dimension. Counts its rows and cuts it into towers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.batches.columns import (
    Branch,
    Column,
    Node,
    Whole,
    columns,
    parse,
    resolved,
    unmarked,
    version_of,
    wholes,
)
from samestep.batches.copier import Copier, copied
from samestep.batches.fingerprint import fingerprint
from samestep.batches.nest import PLAIN, entries, mapped, rebuilt, tensors
from samestep.errors import BatchError, UsageError, shown
from samestep.summation.placement import Placement, even_ranges
from samestep.workers.job import Job

__all__ = ["GlobalBatch", "LocalBatch", "Slices", "cut"]


@dataclass(frozen=True)
class LocalBatch:
    """One worker's part of a global batch, already cut into its towers.

    A `TowerLoader` yields these. Make your own to pass data from any other source: see docs/data.md.

    Attributes:
        rows: rows of the global batch.
        slices: from tower index to the tower's batch, for this worker's towers that have rows, in order. Any
            mapping works, such as one that reads a tower's batch on access.
        position: the batch's number in the run, from 0.
        fingerprint: a 32-bit number of the global batch; workers compare it, to check that they have the
            same batch.
        tower_rows: the rows of each of the T towers, empty towers last; by default as even as possible, the
            larger ones first.
        again: makes the same batch for the towers that this worker runs now, in case the placement has
            changed since; None if it cannot be made again.
        compared: reads a part of the batch that all workers can read, and returns a 32-bit number of it for
            them to compare; None to compare nothing more.
        used: called after each step with the batch, so that a loader knows which of its batches were used;
            None to call nothing.

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
    tower_rows: Sequence[int] | None = None
    again: Callable[[], LocalBatch] | None = field(default=None, repr=False, compare=False)
    compared: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    used: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, key: Any) -> NoReturn:
        """Raise an error that explains where the rows are, for loops that unpack a DataLoader's batch."""
        raise UsageError(
            "a loader's batch cannot be indexed or unpacked, because it holds this worker's towers one by "
            "one: loop over towers(batch), and index tower.batch"
        )

    def ranges(self, num_towers: int) -> list[range]:
        """Return the rows of the global batch that each tower has."""
        if self.tower_rows is None:
            return even_ranges(self.rows, num_towers)
        return [range(start, stop) for start, stop in pairwise(accumulate(self.tower_rows, initial=0))]

    def row_tensors(self, batch: Any, rows: int) -> Iterator[Tensor]:
        """Yield the tensors in a tower's batch that hold its rows, without values that are not cut."""
        root = self.slices.root if isinstance(self.slices, Slices) else None
        for each in tensors(batch) if root is None else _in_columns(root, batch):
            if isinstance(each, Tensor) and (root is not None or (each.dim() and each.size(0) == rows)):
                yield each

    def batch_tensors(self) -> list[Tensor]:
        """Return the tensors of the global batch that are cut, if it is known."""
        root = self.slices.root if isinstance(self.slices, Slices) else None
        found = [] if root is None else [column.value for column in columns(root)]
        return [each for each in found if isinstance(each, Tensor)]

    def has_only_tensors(self, batch: Any, rows: int) -> bool:
        """Say whether towers' batches differ only in tensors, of this many rows in this one."""
        if isinstance(self.slices, Slices) and self.slices.root is not None:
            return all(isinstance(column.value, Tensor) for column in columns(self.slices.root))
        return _is_of_tensors(batch, rows)

    def to(self, device: torch.device) -> LocalBatch:
        """Return the same batch with its tensors on a device; each tower's are moved on access."""
        copier = Copier(device)
        read = partial(_at_turn, copier, lambda tower: copier.moved(unmarked(self.slices[tower])))
        return replace(self, slices=Slices(tuple(self.slices), read))


@dataclass(frozen=True, eq=False, repr=False)
class Slices(Mapping[int, Any]):
    """Towers' batches, made on each access, so that only one at a time is in memory.

    Attributes:
        towers: the towers' indices.
        make: from a tower's index to its batch.
        root: the structure of the global batch that they are cut from, if there is one.
    """

    towers: Sequence[int]
    make: Callable[[int], Any]
    root: Node | None = None

    def __getitem__(self, tower: int) -> Any:
        if tower not in self._known:
            raise KeyError(tower)
        return self.make(tower)

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self.towers)  # a search in a tuple for each of T towers would take T² steps

    def __iter__(self) -> Iterator[int]:
        return iter(self.towers)

    def __len__(self) -> int:
        return len(self.towers)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch, parsed.

    Attributes:
        root: its structure.
        rows: the number of rows, the same in all columns.
        versions: the tensors that are not cut, and their version counters when the batch was opened.
    """

    root: Node
    rows: int
    versions: Sequence[tuple[Tensor, int]]

    @classmethod
    def open(cls, batch: Any) -> GlobalBatch:
        """Parse a nest and count its rows.

        Raises:
            BatchError: nothing in the nest has rows, something cannot be cut, or numbers of rows differ.
        """
        _check_is_no_loaders(batch)
        try:
            root = parse(batch)
        except RecursionError:
            raise BatchError(
                f"batch is a {type(batch).__name__} that holds itself, or is nested too deeply: expected a "
                "nest of tensors and arrays, without entries that refer back"
            ) from None
        rows = _rows(root)
        if rows is None:  # only ambiguous lists: each must then be readable in one way
            root = resolved(root, None)
            rows = _rows(root)
        if rows is None:
            raise BatchError(
                f"batch is a {type(batch).__name__} without tensors, arrays or lists with one entry per row: "
                "expected a nest of them"
            )
        root = resolved(root, rows)
        _check_rows(list(columns(root)))
        given = [each for value in wholes(root) for each in tensors(value) if isinstance(each, Tensor)]
        return cls(root, rows, [(each, version_of(each)) for each in given])

    def take(self, rows: range, copier: Copier) -> Any:
        """Copy some rows of each column, tensors to the copier's device, into the same structure.

        The rows are copied even on the same device: a view may start at any address, and kernels may be
        chosen by alignment.

        Raises:
            BatchError: a tensor was modified since the batch was opened.
        """
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise BatchError(
                "a tensor in samestep.Whole was modified after the step began, so towers would see different "
                "values: expected one that stays unchanged until average(); modify a clone instead"
            )
        return _taken(self.root, slice(rows.start, rows.stop), copier)

    def fingerprint(self) -> int:
        """Return a 32-bit number that identifies the batch; see `samestep.batches.fingerprint`."""
        return fingerprint(self.root)


def cut(batch: Any, placement: Placement, job: Job, *, is_read_twice: bool = False) -> LocalBatch:
    """Cut a global batch into this worker's towers, or check a `LocalBatch`, which is cut already.

    A tower's rows are copied on each access.

    Args:
        batch: any nest, or a `LocalBatch`.
        placement: which towers each worker runs.
        job: this worker's view of the job.
        is_read_twice: read all slices of a `LocalBatch` now, and keep them in host memory.

    Raises:
        BatchError: numbers of rows differ, there are no rows, something cannot be cut, or a `LocalBatch`
            holds other towers than this worker's.
    """
    if isinstance(batch, LocalBatch):
        _check_tower_rows(batch, placement.num_towers)
        local = _made_for(batch, placement, job)
        if is_read_twice:
            if local.compared is not None:
                local.compared()  # now, because a loader reads it with the first slices
            local = replace(local, slices=dict(local.slices))
        local = replace(local.to(job.device), fingerprint=_with_tower_rows(local))
    else:
        whole, copier = GlobalBatch.open(batch), Copier(job.device)
        mine = placement.rows(job.rank, whole.rows)
        read = partial(_at_turn, copier, lambda tower: whole.take(mine[tower], copier))
        number = whole.fingerprint() if job.world_size > 1 else 0
        local = LocalBatch(whole.rows, Slices(tuple(mine), read, whole.root), fingerprint=number)
    if local.rows == 0:
        raise BatchError("the batch has no rows: expected at least one")
    return local


def _check_is_no_loaders(batch: Any) -> None:
    """Raise if a loader's batch is only a part of the batch, as where two loaders are read with `zip`."""
    held = entries(batch) if isinstance(batch, tuple | Mapping) else None
    for key, value in (held or {}).items():
        if isinstance(value, LocalBatch):
            raise BatchError(
                f"batch[{key!r}] is a batch of a loader, which holds this worker's towers one by one: "
                "expected it alone, towers(batch); to read two datasets side by side, give one loader a "
                "dataset whose examples have both, such as torch.utils.data.StackDataset(first, second)"
            )


def _at_turn(copier: Copier, read: Callable[[int], Any], tower: int) -> Any:
    copier.wait_for_pass()
    return read(tower)


def _with_tower_rows(local: LocalBatch) -> int:
    rows = local.tower_rows
    return local.fingerprint if rows is None else zlib.crc32(repr([*rows]).encode(), local.fingerprint)


def _check_tower_rows(local: LocalBatch, num_towers: int) -> None:
    rows = local.tower_rows
    if rows is None:
        return
    first_empty = next((tower for tower, n in enumerate(rows) if n == 0), len(rows))
    if len(rows) != num_towers or sum(rows) != local.rows or min(rows) < 0 or any(rows[first_empty:]):
        raise BatchError(
            f"tower_rows = {shown([*rows])}: expected {num_towers} numbers of rows, {local.rows} in all, "
            "zeros last"
        )


def _made_for(local: LocalBatch, placement: Placement, job: Job) -> LocalBatch:
    """Return the batch for the towers that this worker runs now, made again if need be."""
    ranges = local.ranges(placement.num_towers)
    expected = [tower for tower in placement.towers(job.rank) if ranges[tower]]
    if list(local.slices) != expected and local.again is not None:
        local = local.again()
    if list(local.slices) != expected:
        raise BatchError(
            f"the batch holds towers {list(local.slices)}, but this worker runs {expected} of "
            f"{placement.num_towers}: set placement before the batch is requested, after the average() of "
            "the step before, and create its loader with the same Towers"
        )
    return local


def _rows(root: Node) -> int | None:
    """Return the rows of the first tensor or array, or else of the first list or tuple."""
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
            f"{first.rows} rows: expected one entry per row; use samestep.Whole({other.path}) to give it to "
            "every tower unchanged"
        )
    lists = dict.fromkeys(each for each in (other.in_list, first.in_list) if each)
    hint = "".join(f"; if {each} has one entry per row, pass np.fromiter({each}, object)" for each in lists)
    for one, rows in ((other, first.rows), (first, other.rows)):
        if getattr(one.value, "ndim", 1) > 1 and one.value.shape[1] == rows:
            hint += f"; if the second dimension of {one.path} is its rows, transpose it"
    raise BatchError(
        f"{other.path} has {other.rows} rows, {first.path} has {first.rows}: expected the same number of "
        f"rows in all tensors of a batch, along their first dimension{hint}; use "
        f"samestep.Whole({other.path}) to give it to every tower unchanged"
    )


def _taken(node: Node, rows: slice, copier: Copier) -> Any:
    if isinstance(node, Branch):
        return rebuilt(node.nest, {key: _taken(child, rows, copier) for key, child in node.children.items()})
    assert isinstance(node, Column | Whole)
    if isinstance(node, Whole):
        return _whole(node.value, copier)
    if node.version != version_of(node.value):
        raise BatchError(
            f"{node.path} was modified after the step began, before all towers had their turn: expected a "
            "batch that stays unchanged until average(); pass a clone of a tensor that is reused"
        )
    part = node.value[rows]
    if isinstance(part, Tensor):
        return copier.copied(part)
    return mapped(copied, part) if node.is_sequence else copied(part)


def _in_columns(node: Node, part: Any) -> Iterator[Tensor | NDArray[Any]]:
    if isinstance(node, Branch):
        held = entries(part) or {}
        for key, child in node.children.items():
            yield from _in_columns(child, held[key])
    elif isinstance(node, Column):
        for each in tensors(part):
            if isinstance(each, np.ndarray):
                yield from tensors(list(each.flat)) if each.dtype.hasobject else ()
            else:
                yield each


def _is_of_tensors(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.size(0) == rows
    held = None if isinstance(value, PLAIN) else entries(value)
    return held is not None and all(_is_of_tensors(each, rows) for each in held.values())


def _whole(value: Any, copier: Copier) -> Any:
    """Return the value itself, unless tensors in it have to move to the device."""
    elsewhere = any(isinstance(each, Tensor) and each.device != copier.device for each in tensors(value))
    return copier.moved(value) if elsewhere else value
