"""Memory that the workers of one host share: each writes to its own, and the others copy from there.

It has no name in the file system, and is freed when the last process that maps it ends; see
https://man7.org/linux/man-pages/man2/memfd_create.2.html.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.identity import memory_of
from samestep.memory.channel import Channel

__all__ = ["Bytes", "Segment", "Segments", "allocate", "as_bytes", "mapped", "try_out"]

Bytes = npt.NDArray[np.uint8]

_KEPT = 256
"""A segment is freed after this many loans of others: its size belongs to a plan that is no longer used."""


def as_bytes(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor on the CPU."""
    return np.frombuffer(memory_of(tensor), np.uint8)


def allocate(size: int) -> int:
    """Return the file descriptor of new shared memory, all of it reserved, so that writes cannot fail.

    Raises:
        OSError: there is no such memory, as on systems other than Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create("samestep", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int) -> Bytes:
    """Map shared memory as an array, which keeps the mapping alive.

    Python's `mmap` would keep a descriptor open for each, of which a process may have only so many. It is
    used if torch fails, which gives no error number: it fails with the number, or it does the same.

    Raises:
        OSError: it cannot be mapped.
    """
    try:
        whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError:
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    found: Bytes = whole.numpy()
    return found


def try_out(size: int) -> None:
    """Reserve and map shared memory, and free it; raise an `OSError` if this process cannot."""
    descriptor = allocate(size)
    try:
        mapped(descriptor, size)
    finally:
        os.close(descriptor)


@dataclass
class Segment:
    """A piece of shared memory.

    Attributes:
        number: identifies the segment to other workers.
        descriptor: the memory's file descriptor, to be sent to them.
        content: the memory.
        is_lent: whether a tensor lies in it.
        used: the number of its latest loan.
        sent: the channels that its descriptor was sent through, and for each the latest packet that refers to
            the segment.
    """

    number: int
    descriptor: int
    content: Bytes
    is_lent: bool = False
    used: int = 0
    sent: dict[Channel, int] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        """Whether the segment may be written to: it is not lent, and no other worker still reads it."""
        return not self.is_lent and all(
            number <= channel.num_taken_there for channel, number in self.sent.items()
        )

    def take_back(self) -> None:
        """Note that the tensor in it is gone."""
        self.is_lent = False


class Segments:
    """One worker's shared memory. A segment is lent again once its tensor is gone and others have read it."""

    def __init__(self) -> None:
        self._by_address: dict[int, Segment] = {}
        self._num_made = 0
        self._num_loans = 0

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory for `size` elements, at least one.

        Raises:
            OSError: there is no shared memory left.
        """
        num_bytes = size * dtype.itemsize
        segment = self._free(num_bytes) or self._add(num_bytes)
        self._num_loans += 1
        segment.used, segment.is_lent = self._num_loans, True
        part = segment.content[:num_bytes]
        # The tensor's storage keeps this array alive, so the finalizer runs when the storage is freed.
        weakref.finalize(part, segment.take_back).atexit = False
        return torch.from_numpy(part).view(dtype)

    def _free(self, num_bytes: int) -> Segment | None:
        fitting = (
            segment
            for segment in self._by_address.values()
            if num_bytes <= len(segment.content) <= 2 * num_bytes and segment.is_free
        )
        return min(fitting, key=lambda segment: len(segment.content), default=None)

    def _add(self, num_bytes: int) -> Segment:
        descriptor = allocate(num_bytes)
        try:
            segment = Segment(self._num_made, descriptor, mapped(descriptor, num_bytes))
        except BaseException:
            os.close(descriptor)
            raise
        self._num_made += 1
        self._by_address[segment.content.ctypes.data] = segment
        return segment

    def holding(self, tensor: Tensor) -> Segment | None:
        """Return the segment that a tensor lies in."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def let_go(self) -> list[Segment]:
        """Free segments that are no longer used, and return them."""
        oldest = self._num_loans - _KEPT
        old = {
            address: segment
            for address, segment in self._by_address.items()
            if segment.is_free and segment.used <= oldest
        }
        for address, segment in old.items():
            del self._by_address[address]
            os.close(segment.descriptor)
        return list(old.values())

    def close(self) -> None:
        """Free everything; tensors keep their memory."""
        while self._by_address:
            os.close(self._by_address.popitem()[1].descriptor)
