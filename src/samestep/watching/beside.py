"""Compares what losses depend on beside the model between workers: a running mean, a queue, another net."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from samestep.identity import checksum_of
from samestep.watching.origins import is_plain, storage_of
from samestep.watching.reach import Named, in_reach

__all__ = ["LEFT_NUMBER", "Beside", "Found", "difference_beside"]

_MOST_ELEMENTS = 2**16
"""Of larger tensors, about this many elements are compared."""

_SIMPLEST = 256
"""Fractions up to this denominator are not compared: passes may compute them from numbers of rows."""

LEFT_NUMBER = 1
"""The bit for any number that an earlier pass has left, see `KeptNumbers`. Others are for known values."""

Found: TypeAlias = Mapping[str, tuple[int, bool]]
"""By name: a checksum of a value that losses depend on, and whether several passes read it."""


class _Held(NamedTuple):
    """The tensors in one storage."""

    reference: StorageWeakRef  # so that the address is not reused
    numbers: dict[tuple[int, int], int]  # by offset and number of elements


class Beside:
    """The tensors and numbers that a program has when a step starts, and which of them its losses depend on.

    A tensor counts only if a pass reads all of it. A part may be what a tower keeps for itself, and a program
    may look up rows to read its data. Numbers are recognized by their values among the arguments of
    operators. What several passes of a worker read belongs to no tower, so it must be the same on all
    workers.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._numbers: dict[float, int] = {}
        self._objects: dict[str, float] = {}  # numbers, by name
        self._names: list[str] = []
        self._functions: Sequence[Named] = ()
        self._of_pass: dict[int, int] = {}  # checksums of what this pass has read
        self._used: dict[str, dict[int, int]] = {}  # by name, for each tower

    def start_step(self, functions: Sequence[Named]) -> None:
        """Find what the program and `functions` have names for."""
        self.clear()
        self._functions = functions
        for name, value in _named_values(functions):
            if name in self._used or not self._hold(value, len(self._names)):
                continue
            self._used[name] = {}
            self._names.append(name)
            if isinstance(value, float):
                self._objects[name] = value

    def _hold(self, value: Tensor | float, number: int) -> bool:
        if isinstance(value, float):
            return self._numbers.setdefault(value, number) == number
        storage = 0 if is_lazy(value) or not _is_in_memory(value) else storage_of(value)
        if not storage:
            return False
        if storage not in self._held:
            self._held[storage] = _Held(StorageWeakRef(value.untyped_storage()), {})
        return self._held[storage].numbers.setdefault(_place(value), number) == number

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self._numbers.clear()
        self._objects.clear()
        self._names.clear()
        self._used.clear()

    @property
    def holds_any(self) -> bool:
        """Whether there is something that losses may depend on."""
        return bool(self._names)

    def start_pass(self) -> None:
        """Forget what the previous pass has read."""
        self._of_pass.clear()

    def forget(self, storage: int) -> None:
        """Forget a storage that a pass has written to: it no longer has its values from before the step."""
        self._held.pop(storage, None)

    def read(self, tensor: Tensor) -> int:
        """Note a tensor that an operator reads; return its bit, or 0 for an unknown tensor."""
        held = self._held.get(storage_of(tensor)) if self._held and _is_in_memory(tensor) else None
        number = None if held is None else held.numbers.get(_place(tensor))
        if number is None:
            return 0
        if number not in self._of_pass:
            self._of_pass[number] = _checksum(tensor)
        return _bit(number)

    def read_number(self, value: Any) -> int:
        """Note a number among an operator's arguments; return its bit, or 0 for an unknown number."""
        number = self._numbers.get(value) if type(value) is float else None
        if number is None:
            return 0
        self._of_pass[number] = zlib.crc32(repr(value).encode())
        return _bit(number)

    def note_used(self, tower: int, bits: int) -> None:
        """Note what the loss of a tower depends on."""
        for number in self._of_pass if bits else ():
            if bits & _bit(number):
                self._used[self._names[number]][tower] = self._of_pass[number]

    def found(self) -> Found:
        """Return what losses depend on, except what differs between passes of this worker."""
        used = {name: list(seen.values()) for name, seen in self._used.items() if seen}
        return {name: (seen[0], len(seen) > 1) for name, seen in used.items() if len(set(seen)) == 1}

    def found_unchanged(self) -> Found:
        """Return what to compare: `found`, except numbers that passes have replaced by equal ones."""
        now = {id(value) for _, value in _named_values(self._functions)}
        changed = {name for name, value in self._objects.items() if id(value) not in now}
        return {name: each for name, each in self.found().items() if name not in changed}

    def hash(self) -> int:
        """Return a 32-bit hash of `found`; 0 if it is empty."""
        seen = sorted((name, crc) for name, (crc, _) in self.found().items())
        return zlib.crc32(repr(seen).encode()) if seen else 0


def difference_beside(all_found: Sequence[Found]) -> str | None:
    """Describe the first value that differs between workers and that several passes of one worker read.

    >>> difference_beside([{"center": (5, True)}, {"center": (7, False)}])
    'center, which is not part of the model, and differs between workers 0 and 1'
    """
    for name in dict.fromkeys(name for found in all_found for name in found):
        has = {worker: found[name] for worker, found in enumerate(all_found) if name in found}
        first = next((worker for worker, (_, is_of_several) in has.items() if is_of_several), None)
        if first is None:
            continue
        other = next((worker for worker, (crc, _) in has.items() if crc != has[first][0]), None)
        if other is not None:
            one, two = sorted((first, other))
            return f"{name}, which is not part of the model, and differs between workers {one} and {two}"
    return None


def _bit(number: int) -> int:
    return LEFT_NUMBER << number + 1


def _is_compared(value: Any) -> bool:
    return _is_no_fraction(value) if type(value) is float else isinstance(value, (Tensor, nn.Module))


def _is_no_fraction(value: float) -> bool:
    if not math.isfinite(value):
        return False
    nearest = Fraction(value).limit_denominator(_SIMPLEST)
    return not math.isclose(nearest, value, rel_tol=1e-7)


def _named_values(functions: Iterable[Named]) -> Iterator[Named]:
    for name, value in in_reach(_is_compared, functions):
        if not isinstance(value, nn.Module):
            yield name, value
            continue
        with suppress(Exception):  # a user's module may raise anything
            yield from list(_values_of(name, value))


def _values_of(name: str, net: nn.Module) -> Iterator[Named]:
    """Yield the tensors and numbers that a net's modules have."""
    for path, module in net.named_modules(prefix=name):
        for part in (module._parameters, module._buffers, vars(module)):
            for key, value in part.items():
                if _is_compared(value) and not isinstance(value, nn.Module):
                    yield f"{path}.{key}", value


def _is_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor lies in the host's memory as its strides say."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and is_plain(tensor)


def _place(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()


def _checksum(tensor: Tensor) -> int:
    values = tensor.detach().contiguous().view(-1)
    return checksum_of(values[:: max(1, len(values) // _MOST_ELEMENTS)].contiguous())
