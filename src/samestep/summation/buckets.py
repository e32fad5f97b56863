"""Gradients in flat buckets: which parameters travel together, and where each lies. Pure tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.summation.gradients import Gradients
from samestep.summation.layout import Layout
from samestep.summation.placement import even_ranges

__all__ = ["DEFAULT_BUCKET_BYTES", "Bucket", "lay_out_buckets", "pack", "unpack", "views"]

DEFAULT_BUCKET_BYTES = 25 * 2**20

ABSENT = -0.0
"""Stands for "no gradient": x + (−0.0) is x for every x, −0.0 included; with +0.0 it is not."""

USED = float("inf")
"""Flags a parameter that some tower used: stays what it is under addition and division."""

_ALIGNMENT_BYTES = 64

_SMALL_BYTES = 2**19
"""Up to here, over all workers, a round of messages saved is worth the bytes."""


@dataclass(frozen=True)
class Bucket:
    """A group of parameters: their gradients travel as one flat tensor.

    The flat tensor holds the gradients at `offsets`, each aligned to 64 bytes, then at `flags` one flag for
    each parameter, then padding up to a multiple of the number of workers.
    """

    parameters: tuple[int, ...]  # by index
    offsets: tuple[int, ...]
    layouts: tuple[Layout, ...]
    flags: int
    num_elements: int
    dtype: torch.dtype
    shards: tuple[range, ...]  # which elements each worker averages; all of them, where the bucket is small

    @property
    def is_whole(self) -> bool:
        """Whether every worker averages the whole bucket."""
        return len(self.shards[0]) == self.num_elements

    def flags_in(self, flat: Tensor) -> Tensor:
        """Return the flags of the parameters."""
        return flat[self.flags : self.flags + len(self.parameters)]


def lay_out_buckets(
    layouts: Sequence[Layout | None], bucket_bytes: int, num_workers: int
) -> tuple[Bucket, ...]:
    """Group parameters, last one first as backward produces them, into buckets of one dtype each.

    Those whose layout is None are in no bucket. A parameter above `bucket_bytes` is a bucket by itself.
    There is always a bucket, perhaps an empty one, because the first one brings the scalars along.
    """
    groups: list[dict[int, Layout]] = []
    newest: dict[torch.dtype, tuple[dict[int, Layout], int]] = {}
    for index, layout in reversed(list(enumerate(layouts))):
        if layout is None:
            continue
        size = layout.num_elements * layout.dtype.itemsize
        group, held = newest.get(layout.dtype, ({}, 0))
        if not group or held + size > bucket_bytes:
            group, held = {}, 0
            groups.append(group)
        group[index] = layout
        newest[layout.dtype] = group, held + size
    return tuple(_lay_out(group, num_workers) for group in groups or [{}])


def _lay_out(group: dict[int, Layout], num_workers: int) -> Bucket:
    layouts = tuple(group.values())
    dtype = layouts[0].dtype if layouts else torch.float32
    step = _ALIGNMENT_BYTES // dtype.itemsize
    offsets, end = [], 0
    for layout in layouts:
        offsets.append(end)
        end += -(-layout.num_elements // step) * step
    whole = num_workers * step
    num_elements = max(1, -(-(end + len(group)) // whole)) * whole
    is_small = num_workers * num_elements * dtype.itemsize <= _SMALL_BYTES
    shards = [range(num_elements)] * num_workers if is_small else even_ranges(num_elements, num_workers)
    return Bucket(tuple(group), tuple(offsets), layouts, end, num_elements, dtype, tuple(shards))


def views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Return each parameter's place in a flat tensor, in the parameter's shape and memory format."""
    return [
        flat.as_strided(layout.shape, layout.strides, flat.storage_offset() + offset)
        for layout, offset in zip(bucket.layouts, bucket.offsets, strict=True)
    ]


def pack(bucket: Bucket, flat: Tensor, gradients: Gradients) -> None:
    """Copy one subtree's gradients of a bucket's parameters to their places, and set the flags."""
    flags = bucket.flags_in(flat).fill_(USED)
    places, present = [], []
    for position, (place, gradient) in enumerate(zip(views(bucket, flat), gradients, strict=True)):
        if gradient is None:
            flags[position] = ABSENT
            place.fill_(ABSENT)
        else:
            places.append(place)
            present.append(gradient)
    if present:
        torch._foreach_copy_(places, present)


def unpack(bucket: Bucket, flat: Tensor, used_here: Sequence[bool]) -> Iterator[tuple[int, Tensor | None]]:
    """Yield (parameter index, gradient): None where no tower used the parameter.

    A flag is read, and a GPU waited for, only for parameters that none of this worker's towers used.
    """
    for position, (index, place) in enumerate(zip(bucket.parameters, views(bucket, flat), strict=True)):
        used = used_here[position] or bool(flat[bucket.flags + position] != 0)
        yield index, place if used else None
