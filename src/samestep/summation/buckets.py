"""Gradients in flat buckets: which parameters travel together, and where each lies. Pure tensors."""

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
    "Piece",
    "Section",
    "Shares",
    "lay_out_buckets",
    "lay_out_shares",
    "pack",
    "unpack",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20

ABSENT = -0.0
"""Stands for "no gradient": x + (−0.0) is x for every x, even −0.0, which x + (+0.0) is not."""

USED = float("inf")
"""Flag of a parameter that some tower used. Addition and division do not change it."""

_ALIGNMENT_BYTES = 64

_SMALL_BYTES = 2**19
"""Buckets of up to this many bytes, times workers, go whole to all: more bytes, but one round less."""

Shares = Mapping[int, Sequence[tuple[int, range]]]
"""By parameter index: the workers, each with the elements whose averages it gets."""


class Average(NamedTuple):
    """The averaged gradient of a parameter, or of a part of its elements."""

    parameter: int  # by index
    start: int  # its first element, in memory order
    gradient: Tensor | None  # in the parameter's shape, but a part is flat; None if no tower used it


@dataclass(frozen=True)
class Piece:
    """Elements of a gradient that lie together."""

    parameter: int  # by index
    elements: range  # in memory order
    layout: Layout
    offset: int  # of the elements in their section

    @cached_property
    def is_whole(self) -> bool:
        """Whether they are all of the gradient's."""
        return len(self.elements) == self.layout.num_elements

    def of(self, gradient: Tensor) -> Tensor:
        """Return these elements of a gradient."""
        if self.is_whole:
            return gradient
        return in_order(gradient, self.layout.strides)[self.elements.start : self.elements.stop]

    def place_in(self, flat: Tensor) -> Tensor:
        """Return where they lie in a section, in the parameter's shape and memory format, or flat."""
        if self.is_whole:
            layout = self.layout
            return flat.as_strided(layout.shape, layout.strides, flat.storage_offset() + self.offset)
        return flat[self.offset : self.offset + len(self.elements)]


@dataclass(frozen=True)
class Section:
    """A part of a bucket: pieces, each aligned to 64 bytes; a flag for each, starting at `flags`; padding."""

    extent: range  # in the bucket
    pieces: tuple[Piece, ...]
    flags: int

    def flags_in(self, flat: Tensor) -> Tensor:
        """Return the flags in a section."""
        return flat[self.flags : self.flags + len(self.pieces)]


@dataclass(frozen=True)
class Bucket:
    """A group of parameters: their gradients travel as one flat tensor.

    It has either one section, of which each worker averages a part for all workers, or one section for each
    worker, which keeps the averages to itself.
    """

    parameters: tuple[int, ...]  # by index
    sections: tuple[Section, ...]
    num_elements: int
    dtype: torch.dtype
    shards: tuple[range, ...]  # the elements that each worker averages; all, if the bucket is small

    @property
    def is_shared_out(self) -> bool:
        """Whether each worker keeps the averages of its shard to itself."""
        return len(self.sections) > 1

    @property
    def is_whole(self) -> bool:
        """Whether every worker averages the whole bucket."""
        return len(self.shards[0]) == self.num_elements

    @property
    def is_gathered(self) -> bool:
        """Whether all workers get the averages of all shards."""
        return not (self.is_whole or self.is_shared_out)


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


def _lay_out(group: Mapping[int, Layout], num_workers: int) -> Bucket:
    dtype = next((layout.dtype for layout in group.values()), torch.float32)
    found = [(index, range(layout.num_elements), layout) for index, layout in group.items()]
    section = _section(0, found, dtype, num_workers)
    num_elements = len(section.extent)
    is_small = num_workers * num_elements * dtype.itemsize <= _SMALL_BYTES
    shards = [section.extent] * num_workers if is_small else even_ranges(num_elements, num_workers)
    return Bucket(tuple(group), (section,), num_elements, dtype, tuple(shards))


def lay_out_shares(bucket: Bucket, shares: Shares) -> Bucket:
    """Return a bucket of the same parameters, where each worker gets the averages of its share."""
    (whole,) = bucket.sections
    sections: list[Section] = []
    for worker in range(len(bucket.shards)):
        found = [
            (piece.parameter, elements, piece.layout)
            for piece in whole.pieces
            for owner, elements in shares[piece.parameter]
            if owner == worker
        ]
        start = sections[-1].extent.stop if sections else 0
        sections.append(_section(start, found, bucket.dtype, 1))
    shards = tuple(section.extent for section in sections)
    return Bucket(bucket.parameters, tuple(sections), shards[-1].stop, bucket.dtype, shards)


def _section(
    start: int, found: Sequence[tuple[int, range, Layout]], dtype: torch.dtype, num_parts: int
) -> Section:
    """Lay out pieces, in a section that can be cut in equal parts, each aligned."""
    step = _ALIGNMENT_BYTES // dtype.itemsize
    pieces, end = [], 0
    for index, elements, layout in found:
        pieces.append(Piece(index, elements, layout, end))
        end += -(-len(elements) // step) * step
    part = num_parts * step
    size = max(1, -(-(end + len(pieces)) // part)) * part
    return Section(range(start, start + size), tuple(pieces), end)


def pack(bucket: Bucket, flat: Tensor, gradients: Gradients) -> None:
    """Copy one subtree's gradients of a bucket's parameters to their places, and set the flags."""
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
    """Yield the averages in a section: None where no tower used the parameter.

    A flag is read, and a GPU waited for, only for parameters that none of this worker's towers used.
    """
    flags = section.flags_in(flat)
    for position, piece in enumerate(section.pieces):
        used = used_here[piece.parameter] or bool(flags[position] != 0)
        yield Average(piece.parameter, piece.elements.start, piece.place_in(flat) if used else None)
