"""A batch: nested tensors, rows first. Counting its rows and cutting it into towers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import BatchError
from samestep.summation.placement import Placement
from samestep.workers.job import Job

__all__ = ["GlobalBatch", "LocalBatch", "cut"]

_SAMPLED_ROWS = 16
_SAMPLED_VALUES = 256


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
        moved = pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), dict(self.slices))
        return replace(self, slices=moved)


@dataclass(frozen=True)
class GlobalBatch:
    """A whole batch taken apart: its tensors, and how to nest them again."""

    tensors: list[Tensor]
    entries: list[Any]
    spec: pytree.TreeSpec
    rows: int

    @classmethod
    def open(cls, batch: Any) -> GlobalBatch:
        """Take a nest apart and count its rows.

        Raises:
            BatchError: no tensor in the nest, one without dimensions, or numbers of rows that differ.
        """
        entries, spec = pytree.tree_flatten(batch)
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        if not tensors:
            raise BatchError(f"batch is a {type(batch).__name__} without tensors: expected a nest of tensors")
        if any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
            raise BatchError(_explain_rows(batch))
        return cls(tensors, entries, spec, len(tensors[0]))

    def take(self, rows: range, device: torch.device) -> Any:
        """Copy some rows of each tensor to a device, nested as before.

        It is a copy even there, because a view may start at any address, and kernels may choose by
        alignment.
        """
        part = slice(rows.start, rows.stop)
        taken = [e[part].to(device, copy=True) if isinstance(e, Tensor) else e for e in self.entries]
        return pytree.tree_unflatten(taken, self.spec)

    def fingerprint(self) -> int:
        """Return a 32-bit number that tells batches apart: shapes, dtypes, and a few values.

        Values are sampled from CPU tensors only: reading a GPU's would make the host wait for it.
        """
        crc = 0
        for tensor in self.tensors:
            crc = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), crc)
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                crc = zlib.crc32(_sample(tensor), crc)
        return crc


def cut(batch: Any, placement: Placement, job: Job) -> LocalBatch:
    """Cut a global batch into this worker's towers, or check one that has been cut already.

    Raises:
        BatchError: tensors' rows disagree, there are none, or a `LocalBatch` is another worker's.
    """
    if isinstance(batch, LocalBatch):
        local = batch.to(job.device)
        _check_slices(local, placement, job)
    else:
        whole = GlobalBatch.open(batch)
        mine = placement.rows(job.rank, whole.rows)
        fingerprint = whole.fingerprint() if job.world_size > 1 else 0
        slices = {tower: whole.take(mine[tower], job.device) for tower in mine}
        local = LocalBatch(whole.rows, slices, fingerprint=fingerprint)
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


def _sample(tensor: Tensor) -> bytes:
    rows = tensor.detach()[:: max(1, len(tensor) // _SAMPLED_ROWS)].reshape(-1)
    values = rows[:: max(1, rows.numel() // _SAMPLED_VALUES)].contiguous()
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _explain_rows(batch: Any) -> str:
    """Name the first tensor that has another number of rows than the first one."""
    entries, _ = pytree.tree_flatten_with_path(batch)
    named = [("batch" + pytree.keystr(path), entry) for path, entry in entries if isinstance(entry, Tensor)]
    for name, tensor in named:
        if tensor.ndim == 0:
            return f"{name} is a 0-dimensional tensor: expected rows along the first dimension"
    (first, reference), *others = named
    name, tensor = next((name, tensor) for name, tensor in others if len(tensor) != len(reference))
    return (
        f"{name} has {len(tensor)} rows, {first} has {len(reference)}: "
        "expected the same number of rows in all tensors of a batch"
    )
