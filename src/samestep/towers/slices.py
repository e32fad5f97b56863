"""Groups of T small batches, one group per step, for loops that accumulate gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from samestep.arguments import check_kind
from samestep.batches.batch import GlobalBatch, LocalBatch
from samestep.batches.copier import copied
from samestep.batches.nest import mapped
from samestep.errors import BatchError, ConfigError, shown

if TYPE_CHECKING:
    from samestep.towers.towers import Towers

__all__ = ["NumRows", "in_steps"]

NumRows: TypeAlias = int | Callable[[Any], int] | None
"""Rows of a small batch: a number, a function rows(small_batch), or None to count them."""


def in_steps(batches: Iterable[Any], towers: Towers, rows: NumRows) -> Iterator[LocalBatch]:
    """Group T small batches at a time, fewer at the end; see `Towers.slices`."""
    if not (rows is None or callable(rows) or _is_count(rows)):
        raise ConfigError(f"rows = {shown(rows)}: expected an int >= 1, a function of a small batch, or None")
    check_kind("batches", batches, Iterable, "an iterable of small batches, such as a DataLoader")
    return _steps(iter(batches), towers, rows)


def _steps(batches: Iterator[Any], towers: Towers, rows: NumRows) -> Iterator[LocalBatch]:
    for position in count():
        batch = _next_step(batches, towers, rows, position)
        if batch is None:
            return
        yield batch


def _next_step(batches: Iterator[Any], towers: Towers, rows: NumRows, position: int) -> LocalBatch | None:
    """Return the next batch; keep all T small ones if this worker may have to run other towers."""
    small: Iterable[Any] = islice(batches, towers.placement.num_towers)
    if not towers._may_change_workers:
        made = _made(small, towers, rows, position)
    else:
        small = [mapped(copied, batch) for batch in small]
        made = replace(
            _made(small, towers, rows, position), again=partial(_made, small, towers, rows, position)
        )
    return made if made.rows else None


def _made(small: Iterable[Any], towers: Towers, rows: NumRows, position: int) -> LocalBatch:
    """Make a batch from copies, because an iterator may reuse the memory of its small batches."""
    placement, own, tower_rows, crc = towers.placement, {}, [], 0
    for tower, batch in enumerate(small):
        num_rows, number = _measured(batch, f"small batch {tower} of batch {position}", towers, rows)
        tower_rows.append(num_rows)
        crc = zlib.crc32(number.to_bytes(4), crc)
        if tower in placement.towers(towers.job.rank):
            own[tower] = mapped(copied, batch)
    missing = placement.num_towers - len(tower_rows)
    return LocalBatch(sum(tower_rows), own, position, crc, [*tower_rows, *[0] * missing])


def _measured(batch: Any, name: str, towers: Towers, rows: NumRows) -> tuple[int, int]:
    """Return a small batch's number of rows, and its fingerprint if there are several workers."""
    given_rows = rows(batch) if callable(rows) else rows
    try:
        whole = GlobalBatch.open(batch)
    except BatchError as error:
        if given_rows is None:
            raise BatchError(
                f"{name}: {error}; or say how many rows it has: slices(..., rows=...)"
            ) from error
        return _checked(given_rows, name), 0
    number = whole.fingerprint() if towers.job.world_size > 1 else 0
    if isinstance(rows, int) and whole.rows != rows:
        raise BatchError(f"{name} has {whole.rows} rows: expected {rows}; without rows=, they are counted")
    return _checked(whole.rows if given_rows is None else given_rows, name), number


def _checked(rows: object, name: str) -> int:
    if not _is_count(rows):
        raise BatchError(f"{name} has {shown(rows)} rows: expected an int >= 1")
    assert isinstance(rows, int)
    return rows


def _is_count(rows: object) -> bool:
    return isinstance(rows, int) and not isinstance(rows, bool) and rows >= 1
