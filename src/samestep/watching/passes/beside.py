"""Finds what losses depend on beside the model: a running mean, a queue, another net."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep.errors import warn
from samestep.watching.operators.origins import Kept, keep_address, storage_of
from samestep.watching.operators.values import MOST_ELEMENTS, checksum_of_value, is_readable
from samestep.watching.passes.held_number import HeldNumber, is_number, is_simple
from samestep.watching.program.reach import Named, in_reach

__all__ = [
    "COUNTED_NUMBER",
    "LEFT_NUMBER",
    "MOST_EXPRESSIONS",
    "Beside",
    "Found",
    "Used",
    "expression_bit",
]
_MOST_NUMBERS = 64
"""Larger tensors are not searched for numbers."""

LEFT_NUMBER, COUNTED_NUMBER = 1, 2
MOST_EXPRESSIONS = 64
"""The bits for numbers that an earlier pass has left (`KeptNumbers`), and for those that count passes
(`PassCounts`). After them come those for expressions that take numbers (`CarriedNumbers`), then those for
known values."""


class Used(NamedTuple):
    """A value that losses depend on.

    Attributes:
        checksum: of the value.
        kinds: numbers of rows of the towers whose passes read it, each with the value's shape. A program may
            keep what depends on these alone, such as a mask, from one pass to the next.
        is_of_several: whether several passes read it.
        may_be_of_tower: whether only one pass read it, and the program may have it for that tower alone.
    """

    checksum: int
    kinds: frozenset[tuple[int, ...]]
    is_of_several: bool
    may_be_of_tower: bool


Found: TypeAlias = Mapping[str, Used]
"""What losses depend on, by name."""


class _Read(NamedTuple):
    """A value that a pass has read."""

    checksum: int
    shape: tuple[int, ...]


class _Held(NamedTuple):
    """The tensors in one storage, or the NumPy arrays that begin at one address."""

    reference: Kept | NDArray[Any]  # so that the address is not reused
    indices: dict[tuple[int, int], int]  # of values in `Beside`, by offset and number of elements


_Value: TypeAlias = Tensor | NDArray[Any] | float


class Beside:
    """The tensors, arrays and numbers that a program has when a step starts, and which its losses depend on.

    A tensor counts only if a pass reads all of it. A part may be what a tower keeps for itself, and a program
    may look up rows to read its data. Numbers are recognized by their values among the arguments of
    operators, and NumPy's arrays by their addresses, or by their values in `torch.tensor`. What several
    passes of a worker read belongs to no tower, so it must be the same on all workers.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}  # tensors, by their storages
        self._arrays: dict[int, _Held] = {}  # by their addresses
        self._numbers: dict[float, int] = {}  # the indices of numbers
        self._objects: dict[int, HeldNumber] = {}  # of numbers, by their indices
        self._names: list[str] = []
        self._entries: set[int] = set()  # those in a list or dict, which may have an entry for each tower
        self._of_pass: dict[int, _Read] = {}
        self._num_rows = 0
        self._has_warned = False
        self._used: dict[str, dict[tuple[int, int], _Read]] = {}  # by name, and by tower and its rows

    def start_step(self, functions: Sequence[Named]) -> None:
        """Find what the program and `functions` have names for."""
        self.clear()
        for name, value in _named_values(functions):
            index = None if name in self._used else self._hold(value, len(self._names))
            if index is not None and "[" in name:
                self._entries.add(index)
            if index != len(self._names):
                continue
            self._used[name] = {}
            self._names.append(name)
            if is_number(value):
                self._objects[index] = HeldNumber(value)

    def _hold(self, value: _Value, index: int) -> int | None:
        """Return the value's index: `index` for a new one; None if it cannot be followed."""
        if isinstance(value, Tensor):
            storage = storage_of(value) if is_readable(value) else 0
            if not storage:
                return None
            if storage not in self._held:
                self._held[storage] = _Held(keep_address(value), {})
            return self._held[storage].indices.setdefault(_place(value), index)
        if isinstance(value, np.ndarray):
            held = self._arrays.setdefault(value.ctypes.data, _Held(value, {}))
            return held.indices.setdefault((0, value.size), index)
        # By another object, because references to this one are counted.
        return self._numbers.setdefault(float(value) * 1.0, index)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self._arrays.clear()
        self._numbers.clear()
        self._objects.clear()
        self._names.clear()
        self._entries.clear()
        self._used.clear()

    @property
    def holds_any(self) -> bool:
        """Whether there is something that losses may depend on."""
        return bool(self._names)

    def start_pass(self, num_rows: int, rows: Iterable[Tensor]) -> None:
        """Forget what the previous pass has read, and the storages of this one's rows."""
        self._of_pass.clear()
        self._num_rows = num_rows
        for each in self._objects.values():
            each.note()
        for tensor in rows:
            self.forget(storage_of(tensor))

    def forget(self, storage: int) -> None:
        """Forget a storage: it has a tower's rows, or no longer its values from before the step."""
        self._held.pop(storage, None)

    def read(self, tensor: Tensor) -> int:
        """Note a tensor that an operator reads; return its bit, or 0 for an unknown tensor."""
        if not (self._held or self._arrays) or not is_readable(tensor):
            return 0
        held, place = self._held.get(storage_of(tensor)), _place(tensor)
        if held is None and self._arrays:
            held, place = self._arrays.get(tensor.data_ptr()), (0, tensor.numel())
        index = None if held is None else held.indices.get(place)
        return 0 if index is None else self._note_read(index, tensor)

    def _note_read(self, index: int, tensor: Tensor) -> int:
        if index not in self._of_pass:
            self._of_pass[index] = _Read(checksum_of_value(tensor), tuple(tensor.shape))
        return _bit(index)

    def read_copy(self, tensor: Tensor) -> int:
        """Note a tensor that `torch.tensor` has made; return the bits of the array or numbers in it."""
        if tensor.numel() > MOST_ELEMENTS or not tensor.is_cpu:
            return 0
        for held in self._arrays.values():
            index = held.indices.get((0, tensor.numel()))
            if index is not None and _has_values(tensor, held.reference):
                return self._note_read(index, tensor)
        if tensor.numel() > _MOST_NUMBERS or not tensor.is_floating_point():
            return 0
        bits, elements = 0, set(tensor.flatten().tolist())
        rounded = torch.tensor(list(self._numbers), dtype=tensor.dtype).tolist()
        for value, found in zip(self._numbers, rounded, strict=True):
            bits |= self.read_number(value) if found in elements else 0
        return bits

    def read_number(self, value: Any) -> int:
        """Note a number among an operator's arguments; return its bit, or 0 for an unknown number."""
        index = self._numbers.get(value) if type(value) is float else None
        if index is None or not self._objects[index].is_held:
            return 0
        self._of_pass[index] = _Read(zlib.crc32(repr(value).encode()), ())
        return _bit(index)

    def note_used(self, tower: int, bits: int) -> None:
        """Note what the loss of a tower depends on."""
        for index in self._of_pass if bits else ():
            if bits & _bit(index):
                self._used[self._names[index]][tower, self._num_rows] = self._of_pass[index]

    def found(self) -> Found:
        """Return what losses depend on, except what differs between passes of this worker."""
        found = {}
        for index, name in enumerate(self._names):
            seen = self._used[name]
            if len({read.checksum for read in seen.values()}) == 1:
                kinds = frozenset((num_rows, *read.shape) for (_, num_rows), read in seen.items())
                is_of_several, checksum = len(seen) > 1, next(iter(seen.values())).checksum
                is_entry = index in self._entries
                found[name] = Used(checksum, kinds, is_of_several, is_entry and not is_of_several)
        return found

    def warn(self, message: str) -> None:
        """Warn, once."""
        if not self._has_warned:
            self._has_warned = True
            warn(message)

    def hash(self) -> int:
        """Return a 32-bit hash of `found`; 0 if it is empty."""
        seen = sorted((name, used.checksum) for name, used in self.found().items())
        return zlib.crc32(repr(seen).encode()) if seen else 0


def expression_bit(index: int) -> int:
    """Return the bit for one of `MOST_EXPRESSIONS` expressions of a program."""
    return COUNTED_NUMBER << index + 1


def _bit(index: int) -> int:
    return expression_bit(MOST_EXPRESSIONS + index)


def _is_compared(value: Any) -> bool:
    """Say whether a value is compared, by its type, so that proxies load nothing."""
    if is_number(value):
        return not is_simple(float(value))
    if issubclass(type(value), np.ndarray):
        kind = value.dtype
        return kind.kind in "biuf" and kind.itemsize <= 8 and kind.isnative and value.size > 0
    return issubclass(type(value), (Tensor, nn.Module))


def _named_values(functions: Iterable[Named]) -> Iterator[Named]:
    nets = set[nn.Module]()
    for name, value in in_reach(_is_compared, functions):
        if not isinstance(value, nn.Module):
            yield name, value
            continue
        if value in nets:
            continue
        nets.add(value)
        with suppress(Exception):  # a user's module may raise anything
            yield from list(_values_of(name, value))


def _values_of(name: str, net: nn.Module) -> Iterator[Named]:
    """Yield the tensors and numbers that a net's modules have."""
    for path, module in net.named_modules(prefix=name):
        for part in (module._parameters, module._buffers, vars(module)):
            for key, value in part.items():
                if _is_compared(value) and not isinstance(value, nn.Module):
                    yield f"{path}.{key}", value


def _has_values(tensor: Tensor, array: object) -> bool:
    """Whether a tensor has the values of an array, rounded to its dtype."""
    if not isinstance(array, np.ndarray) or tensor.shape != array.shape:
        return False
    return torch.equal(torch.from_numpy(array.copy()).to(tensor.dtype), tensor)


def _place(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()
