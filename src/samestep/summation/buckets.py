"""Flat buckets of gradients: which parameters are sent together, and the offset of each. Pure tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.summation.gradients import Gradients
from samestep.summation.layout import Layout, in_order
from samestep.summation.placement import even_ranges

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Average",
    "Bucket",
    "Owners",
    "Piece",
    "Section",
    "lay_out_buckets",
    "lay_out_shards",
    "pack",
    "unpack",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20

ABSENT = -0.0
"""Stands for "no gradient": x + (−0.0) is x for every x, even for −0.0; x + (+0.0) is not."""

USED = float("inf")
"""The flag of a parameter that some tower used. Addition and division do not change it."""

_ALIGNMENT_BYTES = 64

_SMALL_BYTES = 2**19
"""If a bucket has at most this many bytes, times workers, every worker averages all of it.

That sends more bytes, but saves a round of messages.
"""

Owners = Mapping[int, Sequence[tuple[int, range]]]
"""For each parameter index: pairs of a worker and the elements whose averages it gets."""


class Average(NamedTuple):
    """The averaged gradient of a parameter, or of some of its elements."""

    parameter: int  # its index
    start: int  # the first element, in memory order
    gradient: Tensor | None  # in the parameter's shape; flat if not all elements; None if no tower used it


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of a gradient in a bucket."""

    parameter: int  # its index
    elements: range  # in memory order
    layout: Layout
    offset: int  # of the elements in their section

    @cached_property
    def is_whole(self) -> bool:
        """Whether the piece has all elements of the gradient."""
        return len(self.elements) == self.layout.num_elements

    def of(self, gradient: Tensor) -> Tensor:
        """Return these elements of a gradient."""
        if self.is_whole:
            return gradient
        return in_order(gradient, self.layout.strides)[self.elements.start : self.elements.stop]

    def place_in(self, flat: Tensor) -> Tensor:
        """Return the view of these elements in a section: in the gradient's shape, or flat if not all."""
        if self.is_whole:
            layout = self.layout
            return flat.as_strided(layout.shape, layout.strides, flat.storage_offset() + self.offset)
        return flat[self.offset : self.offset + len(self.elements)]


@dataclass(frozen=True)
class Section:
    """A part of a bucket: pieces, aligned to 64 bytes; a flag for each, from offset `flags` on; padding."""

    extent: range  # in the bucket
    pieces: tuple[Piece, ...]
    flags: int

    def flags_in(self, flat: Tensor) -> Tensor:
        """Return the view of the flags in a section."""
        return flat[self.flags : self.flags + len(self.pieces)]


@dataclass(frozen=True)
class Bucket:
    """A group of parameters whose gradients are sent as one flat tensor.

    It has either one section, and all workers get all averages; or one section for each worker, which gets
    only the averages of its own section.
    """

    parameters: tuple[int, ...]  # their indices
    sections: tuple[Section, ...]
    num_elements: int
    dtype: torch.dtype
    shards: tuple[range, ...]  # the elements that each worker averages; all of them if the bucket is small

    @property
    def is_sharded(self) -> bool:
        """Whether each worker gets only the averages of its own shard."""
        return len(self.sections) > 1

    @property
    def is_whole(self) -> bool:
        """Whether every worker averages the whole bucket."""
        return len(self.shards[0]) == self.num_elements

    @property
    def is_gathered(self) -> bool:
        """Whether workers send each other the averages of their shards."""
        return not (self.is_whole or self.is_sharded)


def lay_out_buckets(
    layouts: Sequence[Layout | None], bucket_bytes: int, num_workers: int
) -> tuple[Bucket, ...]:
    """Group parameters into buckets of one dtype each, in reverse order, as backward produces gradients.

    Parameters whose layout is None are in no bucket. A parameter above `bucket_bytes` gets its own bucket.
    There is always a bucket, even an empty one, because the scalars are sent with the first one.
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


def _lay_out(group: Mapping[int, Layout], num_workers: int) -> Bucket:
    dtype = next((layout.dtype for layout in group.values()), torch.float32)
    found = [(index, range(layout.num_elements), layout) for index, layout in group.items()]
    section = _section(0, found, dtype, num_workers)
    num_elements = len(section.extent)
    is_small = num_workers * num_elements * dtype.itemsize <= _SMALL_BYTES
    shards = [section.extent] * num_workers if is_small else even_ranges(num_elements, num_workers)
    return Bucket(tuple(group), (section,), num_elements, dtype, tuple(shards))


def lay_out_shards(bucket: Bucket, owners: Owners) -> Bucket:
    """Return a bucket of the same parameters, where each worker gets only the averages of its shard."""
    (whole,) = bucket.sections
    sections: list[Section] = []
    for worker in range(len(bucket.shards)):
        found = [
            (piece.parameter, elements, piece.layout)
            for piece in whole.pieces
            for owner, elements in owners[piece.parameter]
            if owner == worker
        ]
        start = sections[-1].extent.stop if sections else 0
        sections.append(_section(start, found, bucket.dtype, 1))
    shards = tuple(section.extent for section in sections)
    return Bucket(bucket.parameters, tuple(sections), shards[-1].stop, bucket.dtype, shards)


def _section(
    start: int, found: Sequence[tuple[int, range, Layout]], dtype: torch.dtype, num_parts: int
) -> Section:
    """Lay out pieces in a section that can be cut into `num_parts` equal, aligned parts."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    pieces, end = [], 0
    for index, elements, layout in found:
        pieces.append(Piece(index, elements, layout, end))
        end += -(-len(elements) // step) * step
    part = num_parts * step
    size = max(1, -(-(end + len(pieces)) // part)) * part
    return Section(range(start, start + size), tuple(pieces), end)


def pack(bucket: Bucket, flat: Tensor, gradients: Gradients) -> None:
    """Copy one subtree's gradients into a flat bucket, and set the flags."""
    by_index = dict(zip(bucket.parameters, gradients, strict=True))
    places, present = [], []
    for section in bucket.sections:
        part = flat[section.extent.start : section.extent.stop]
        flags = section.flags_in(part).fill_(USED)
        for position, piece in enumerate(section.pieces):
            place, gradient = piece.place_in(part), by_index[piece.parameter]
            if gradient is None:
                flags[position] = ABSENT
                place.fill_(ABSENT)
            else:
                places.append(place)
                present.append(piece.of(gradient))
    if present:
        torch._foreach_copy_(places, present)


def unpack(section: Section, flat: Tensor, used_here: Mapping[int, bool]) -> Iterator[Average]:
    """Yield the averages in a section; None for a parameter that no tower used.

    Flags are read, which waits for a GPU, only for parameters that none of this worker's towers used.
    """
    flags = section.flags_in(flat)
    for position, piece in enumerate(section.pieces):
        used = used_here[piece.parameter] or bool(flags[position] != 0)
        yield Average(piece.parameter, piece.elements.start, piece.place_in(flat) if used else None)
