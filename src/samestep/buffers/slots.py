"""Where modules keep their buffers, and the shared values that every pass starts from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samestep.errors import BufferError

__all__ = ["SharedBuffers", "Slot", "find_slots"]


@dataclass(frozen=True)
class Slot:
    """A place where a module keeps a buffer: a forward may write to the tensor there, or put another there.

    Attributes:
        name: as in `model.named_buffers()`.
        module: the module that keeps it.
        attribute: under which name.
    """

    name: str
    module: nn.Module
    attribute: str

    def get(self) -> Tensor | None:
        """Return the tensor that is there now."""
        return self.module._buffers.get(self.attribute)

    def put(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        self.module._buffers[self.attribute] = tensor


def find_slots(model: nn.Module) -> list[Slot]:
    """Return the slots of `model.named_buffers()`, and those that a forward has yet to fill.

    >>> [slot.name for slot in find_slots(nn.Sequential(nn.BatchNorm1d(2)))]
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    slots, seen = [], set()
    for path, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None or id(buffer) not in seen:
                slots.append(Slot(f"{path}.{attribute}" if path else attribute, module, attribute))
                seen.add(id(buffer))
    return slots


class SharedBuffers:
    """Buffers that every pass starts from the same values, whatever the pass before did to them.

    A tensor that a pass puts in a buffer's place must be of the same shape and dtype; the buffer's own
    tensor comes back.

    Args:
        slots: none of them empty.

    Attributes:
        shared: copies of the values at the start of the step.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        self._places = [(slot.module._buffers, slot.attribute) for slot in slots]
        self._homes = [tensor for slot in slots if (tensor := slot.get()) is not None]
        assert len(self._homes) == len(self._slots)
        self.shared = [home.detach().clone() for home in self._homes]
        self._fresh = True

    def start_step(self) -> None:
        """Note the shared values."""
        self._homes = self.values()
        if self._homes:
            torch._foreach_copy_(self.shared, self._homes)
        self._fresh = True

    def start_tower(self) -> None:
        """Put the shared values back."""
        if not self._fresh:
            self.put_back()
        self._fresh = False

    def put_back(self) -> None:
        """Put the shared values back, in any case."""
        self.write(self.shared)

    def end_passes(self) -> None:
        """Leave everything as the last pass left it."""

    def values(self) -> list[Tensor]:
        """Return the tensors that are there now.

        Raises:
            BufferError: one was replaced, and the new one is of another shape, dtype or device.
        """
        values = self._current()
        if all(map(operator.is_, values, self._homes)):
            return self._homes
        self.check()
        return [value.detach() for value in values if value is not None]

    def check(self) -> None:
        """Check shapes, dtypes and devices.

        Raises:
            BufferError: one changed.
        """
        for slot, value, shared in zip(self._slots, self._current(), self.shared, strict=True):
            if value is None or _kind(value) != _kind(shared):
                found = "nothing" if value is None else _kind(value)
                raise BufferError(
                    f"buffer {slot.name} holds {found}, and held {_kind(shared)} when Towers was made: run "
                    "the model once before making Towers, if it is a forward that makes its buffers"
                )

    def write(self, values: Sequence[Tensor]) -> None:
        """Give the buffers new values, in their own tensors."""
        if not all(map(operator.is_, self._current(), self._homes)):
            for slot, home in zip(self._slots, self._homes, strict=True):
                slot.put(home)
        if self._homes:
            torch._foreach_copy_(self._homes, list(values))

    def _current(self) -> list[Tensor | None]:
        return [buffers.get(attribute) for buffers, attribute in self._places]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
