"""Records which towers' rows and random numbers went into the values of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "NOWHERE",
    "Kept",
    "Origin",
    "Origins",
    "Write",
    "is_dense",
    "is_plain",
    "keep_address",
    "storage_of",
]

_MOST_ELEMENTS = 2**24
"""The largest storage whose elements are tracked one by one."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

Write = Callable[[Tensor, int], object]
"""Writes a number to those elements of a tensor that an operator has written to in one of the same shape."""


class Origin(NamedTuple):
    """Where values come from."""

    towers: int  # a bit for each tower whose rows or random numbers went in
    how: str  # how values of two towers first came together; "" if they did not
    beside: int = 0  # a bit for each tensor or number beside the model that went in


NOWHERE = Origin(0, "")

Kept: TypeAlias = StorageWeakRef | None
"""What keeps the address of a storage."""


class Origins:
    """The origins of values, by the storage that holds them."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._storages.clear()
        self._all = [NOWHERE]
        self._numbers = {NOWHERE: 0}

    def forget(self, storage: int) -> None:
        """Forget what a storage holds."""
        self._storages.pop(storage, None)

    def of(self, tensor: Tensor) -> Origin:
        """Return where the values of a tensor come from."""
        tensor = _strided(tensor)
        held = self._storages.get(storage_of(tensor))
        if held is None:
            return NOWHERE
        found = [self._all[number] for number in held.read(tensor)]
        towers = beside = 0
        for each in found:
            towers |= each.towers
            beside |= each.beside
        return Origin(towers, next((each.how for each in found if each.how), ""), beside)

    def note(self, tensor: Tensor, origin: Origin, write: Write | None = None) -> None:
        """Note the origin of values just written to a tensor, to all its elements or those of `write`."""
        tensor = _strided(tensor)
        storage = storage_of(tensor)
        if not storage or (storage not in self._storages and not (origin.towers or origin.beside)):
            return
        number = self._numbers.setdefault(origin, len(self._all))
        if number == len(self._all):
            self._all.append(origin)
        self._storages.setdefault(storage, _Storage(tensor)).note(tensor, number, write)


class _Storage:
    """Origins of a storage's elements, as numbers: one for all of them, or one for each."""

    def __init__(self, tensor: Tensor) -> None:
        self._kept = keep_address(tensor)
        self._itemsize = tensor.itemsize
        self._of_all = 0
        self._of_each: Tensor | None = None

    def read(self, tensor: Tensor) -> list[int]:
        """Return the numbers of a tensor's elements."""
        if self._of_each is None:
            return [self._of_all]
        runs = self._part(self._of_each, tensor).flatten().unique_consecutive()  # faster than `unique`
        numbers: list[int] = runs.unique().tolist()
        return numbers

    def note(self, tensor: Tensor, number: int, write: Write | None) -> None:
        """Set the number of a tensor's elements, or of those that `write` selects."""
        if not is_plain(tensor):
            self._of_all, self._of_each = number, None
            return
        size = tensor.untyped_storage().nbytes()
        num_elements = size // self._itemsize
        # If the storage is too large, other elements' origins are lost: better a miss than a false alarm.
        if (write is None and tensor.nbytes >= size) or num_elements > _MOST_ELEMENTS:
            self._of_all, self._of_each = number, None
            return
        if self._of_each is None or len(self._of_each) != num_elements:  # the storage may have been resized
            self._of_each = torch.full((num_elements,), self._of_all, dtype=torch.int32, device=tensor.device)
        part = self._part(self._of_each, tensor)
        if write is None or part.shape != tensor.shape:
            part.fill_(number)
        else:
            write(part, number)

    def _part(self, numbers: Tensor, tensor: Tensor) -> Tensor:
        """Return the part of `numbers` for a tensor, in its shape if its elements have the tracked size."""
        if len(numbers) * self._itemsize < tensor.untyped_storage().nbytes():  # the storage was resized
            return numbers
        if tensor.itemsize == self._itemsize:
            return numbers.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.itemsize
        return numbers[start // self._itemsize : (start + last * tensor.itemsize) // self._itemsize + 1]


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's `StorageImpl`; 0 for a tensor without memory of its own."""
    try:
        held = tensor if tensor.layout is torch.strided else _strided(tensor)  # called very often
        return 0 if tensor.is_meta else int(held.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # some subclasses
        return 0


def keep_address(tensor: Tensor) -> Kept:
    """Return what keeps `storage_of` a tensor from being that of a later one; its memory may be freed."""
    return StorageWeakRef(_strided(tensor).untyped_storage()) if storage_of(tensor) else None


def _strided(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor, and any other tensor as it is."""
    if tensor.layout is torch.strided or not is_plain(tensor):
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.values() if tensor.layout in _COMPRESSED else tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lies in its storage as its strides say: a subclass may not."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and strides, and lies in its storage as they say."""
    return tensor.layout is torch.strided and is_plain(tensor) and not tensor.is_nested
