"""Gradients in flat buckets: which parameters travel together, and where each lies. Pure tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.summation.placement import even_ranges
from samestep.summation.tree import Gradients
from samestep.workers.job import Job

__all__ = [
    "ABSENT",
    "DEFAULT_BUCKET_BYTES",
    "REFUSED",
    "USED",
    "Bucket",
    "BucketMemory",
    "pack",
    "plan_buckets",
    "unpack",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20

ABSENT = -0.0
"""Stands for "no gradient": x + (−0.0) is x for every x, −0.0 included; with +0.0 it is not."""

USED = float("inf")
"""Flags a parameter that some tower used: stays what it is under addition and division."""

REFUSED = float("nan")
"""Flags a parameter whose gradient does not fit a bucket, because it is sparse: stays what it is, too."""

_ALIGNMENT_BYTES = 64

_SMALL_BYTES = 2**19
"""Up to here, over all workers, a round of messages saved is worth the bytes."""


@dataclass(frozen=True)
class Bucket:
    """A group of parameters whose gradients travel as one flat tensor.

    The flat tensor holds the gradients at `offsets`, each aligned to 64 bytes, then one flag for each
    parameter at `flags`, then padding up to `num_elements`, a multiple of the number of workers.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    flags: int
    num_elements: int
    dtype: torch.dtype


def plan_buckets(
    parameters: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    bucket_bytes: int,
    num_workers: int,
    *,
    leave_out: Collection[int] = (),
) -> list[Bucket]:
    """Group parameters, last one first as backward produces them, into buckets of one dtype each.

    Args:
        parameters: those that get gradients.
        dtypes: in which dtype each parameter's gradient is summed.
        bucket_bytes: a bucket is closed once it holds as much; a larger parameter is one by itself.
        num_workers: shards of a bucket.
        leave_out: parameters, by index, that are in no bucket.

    Returns:
        At least one bucket, because the first one brings the figures along; it may be empty.
    """
    groups: list[list[int]] = []
    open_groups: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed([index for index in range(len(parameters)) if index not in leave_out]):
        dtype, size = dtypes[index], parameters[index].numel() * dtypes[index].itemsize
        group, held = open_groups.get(dtype, ([], 0))
        if not group or held + size > bucket_bytes:
            group, held = [], 0
            groups.append(group)
        group.append(index)
        open_groups[dtype] = (group, held + size)
    if not groups:
        return [_lay_out([], parameters, torch.float32, num_workers)]
    return [_lay_out(group, parameters, dtypes[group[0]], num_workers) for group in groups]


def _lay_out(group: list[int], parameters: Sequence[Tensor], dtype: torch.dtype, num_workers: int) -> Bucket:
    step = _ALIGNMENT_BYTES // dtype.itemsize
    offsets, end = [], 0
    for index in group:
        offsets.append(end)
        end += -(-parameters[index].numel() // step) * step
    whole = num_workers * step
    return Bucket(tuple(group), tuple(offsets), end, -(-(end + len(group)) // whole) * whole, dtype)


def views(bucket: Bucket, flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return each parameter's place in a flat tensor, in the parameter's shape and memory format."""
    return [
        flat[offset : offset + parameters[index].numel()].as_strided(
            parameters[index].shape, _dense_strides(parameters[index]), flat.storage_offset() + offset
        )
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True)
    ]


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()


def pack(bucket: Bucket, flat: Tensor, places: Sequence[Tensor], gradients: Gradients) -> None:
    """Copy one subtree's gradients of a bucket's parameters to their places, and set the flags."""
    present = [(place, g) for place, g in zip(places, gradients, strict=True) if g is not None]
    if present:
        torch._foreach_copy_([place for place, _ in present], [g for _, g in present])
    flags = flat[bucket.flags : bucket.flags + len(gradients)]
    if len(present) == len(gradients):
        flags.fill_(USED)
        return
    for position, (place, gradient) in enumerate(zip(places, gradients, strict=True)):
        flags[position] = ABSENT if gradient is None else USED
        if gradient is None:
            place.fill_(ABSENT)


def unpack(
    bucket: Bucket, flat: Tensor, places: Sequence[Tensor], used_here: Sequence[bool]
) -> Iterator[tuple[int, Tensor | None]]:
    """Yield (parameter index, gradient): None where no tower used the parameter.

    A flag is read, and a GPU waited for, only for parameters that none of this worker's towers used.
    """
    for position, (index, place) in enumerate(zip(bucket.parameters, places, strict=True)):
        used = used_here[position] or bool(flat[bucket.flags + position] != 0)
        yield index, place if used else None


@dataclass(frozen=True)
class BucketMemory:
    """One worker's buffers of a bucket: `rows[0]` holds the averages in the end.

    Attributes:
        rows: [subtrees of this worker, elements].
        places: for each row, each parameter's view of it.
        shards: which elements each worker averages; all of them, where the bucket is small.
        arrived: for each other worker, [its subtrees, elements of this worker's shard].
    """

    rows: Tensor
    places: list[list[Tensor]]
    shards: list[range]
    arrived: dict[int, Tensor]

    @property
    def is_whole(self) -> bool:
        """Whether every worker averages the whole bucket."""
        return len(self.shards[0]) == self.rows.shape[1]

    def partials_for(self, worker: int) -> Tensor:
        """Return [subtrees, elements]: this worker's partial sums of the shard that `worker` averages."""
        return self.rows[:, self.shards[worker].start : self.shards[worker].stop]

    @classmethod
    def allocate(
        cls, bucket: Bucket, job: Job, spans: Sequence[int], parameters: Sequence[Tensor]
    ) -> BucketMemory:
        """Return buffers for a bucket; `spans` has each worker's number of subtrees."""
        like = torch.empty(0, dtype=bucket.dtype, device=job.device)
        rows = like.new_zeros(spans[job.rank], bucket.num_elements)
        shards = _shards(bucket, job.world_size)
        others = [worker for worker in range(job.world_size) if worker != job.rank]
        arrived = {worker: like.new_empty(spans[worker], len(shards[job.rank])) for worker in others}
        return cls(rows, [views(bucket, row, parameters) for row in rows], shards, arrived)


def _shards(bucket: Bucket, num_workers: int) -> list[range]:
    if num_workers * bucket.num_elements * bucket.dtype.itemsize <= _SMALL_BYTES:
        return [range(bucket.num_elements)] * num_workers
    return even_ranges(bucket.num_elements, num_workers)
