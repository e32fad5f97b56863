"""Buffers that start every pass with the same values, and get new shared values after the passes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.buffers.named_buffers import NamedBuffer, reader
from samestep.errors import BufferPolicyError
from samestep.workers.collectives import broadcast
from samestep.workers.job import Job

__all__ = ["AveragedBuffers", "FirstBuffers", "SharedBuffers"]


class SharedBuffers:
    """Buffers that start every pass with the same values, whatever the pass before did to them.

    A tensor that a pass puts in a buffer's place must be of the same shape and dtype; the buffer's own
    tensor comes back. No buffer may be empty. Subclasses say what towers hand in, and what becomes of it.
    """

    num_values = 0  # S, how many numbers each tower contributes

    def __init__(self, buffers: Sequence[NamedBuffer]) -> None:
        self._buffers = buffers
        self._current = reader(buffers)
        self._homes = [tensor for tensor in self._current() if tensor is not None]
        assert len(self._homes) == len(buffers)
        self.shared = [home.detach().clone() for home in self._homes]
        self._fresh = True

    def start_step(self) -> None:
        """Note the shared values, before the first pass."""
        self._homes = self.values()
        if self._homes:
            torch._foreach_copy_(self.shared, self._homes)
        self._fresh = True

    def start_tower(self) -> None:
        """Put the shared values back, before each pass."""
        if not self._fresh:
            self.put_back()
        self._fresh = False

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return what the tower that just ran hands in: float64 [S]."""
        raise NotImplementedError

    def end_passes(self) -> None:
        """Leave the layers as they were found, after the last pass."""

    def finish(self, totals: Tensor, rows: int) -> None:
        """Write the new shared values from the sum over all towers, float64 [S], and the batch's rows."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Give the buffers the values from before the step."""
        self.write(self.shared)

    def values(self) -> list[Tensor]:
        """Return the tensors that are there now; one that was put there must be of the same kind."""
        values = self._current()
        if all(map(operator.is_, values, self._homes)):
            return self._homes
        self.check()
        return [value.detach() for value in values if value is not None]

    def changed(self) -> set[str]:
        """Return the names of those that have other values than the shared ones."""
        pairs = zip(self._buffers, self.values(), self.shared, strict=True)
        return {buffer.name for buffer, value, shared in pairs if not _are_equal(value, shared)}

    def check(self) -> None:
        """Raise if a buffer has another shape, dtype or device."""
        for buffer, value, shared in zip(self._buffers, self._current(), self.shared, strict=True):
            if value is None or _kind(value) != _kind(shared):
                found = "None" if value is None else _kind(value)
                raise BufferPolicyError(
                    f"buffer {buffer.name} is {found}, but was {_kind(shared)} when Towers was made: if the "
                    "first forward makes the model's buffers, run the model once before making Towers"
                )

    def write(self, values: Sequence[Tensor]) -> None:
        """Give the buffers new values, in their own tensors."""
        if not all(map(operator.is_, self._current(), self._homes)):
            for buffer, home in zip(self._buffers, self._homes, strict=True):
                buffer.module._buffers[buffer.attribute] = home
        if self._homes:
            torch._foreach_copy_(self._homes, list(values))


class AveragedBuffers(SharedBuffers):
    """Buffers that each tower updates from the shared value, averaged by rows (or taken from tower 0)."""

    def __init__(self, buffers: Sequence[NamedBuffer], *, first_only: bool = False) -> None:
        super().__init__(buffers)
        self._first_only = first_only
        self.num_values = sum(shared.numel() for shared in self.shared)

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return the values times the rows."""
        values = torch.cat([value.reshape(-1) for value in self.values()]).double()
        if len(values) != self.num_values:
            self.check()
        if not self._first_only:
            return values.mul_(rows)
        return values if tower == 0 else values.zero_()  # 0 times infinity would be NaN

    def finish(self, totals: Tensor, rows: int) -> None:
        """Write the average."""
        values = totals if self._first_only else totals / rows
        parts = values.split([shared.numel() for shared in self.shared])
        self.write([part.view_as(shared) for part, shared in zip(parts, self.shared, strict=True)])


class FirstBuffers(SharedBuffers):
    """Buffers that take over what tower 0 ends with, to the bit, whatever their dtype.

    Worker 0, which runs tower 0, sends its bytes at the end of the step. They do not go with what is added
    in float64, because a queue may be large, and float64 does not hold every int64.
    """

    def __init__(self, buffers: Sequence[NamedBuffer], job: Job) -> None:
        super().__init__(buffers)
        self._ended = [shared.clone(memory_format=torch.contiguous_format) for shared in self.shared]
        self._job = job

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Keep what tower 0 ends with."""
        self.check()
        if tower == 0:
            torch._foreach_copy_(self._ended, self.values())
        return torch.zeros(0, dtype=torch.float64, device=self._job.device)

    def finish(self, totals: Tensor, rows: int) -> None:
        """Give every worker tower 0's values."""
        contents = [ended.reshape(-1).view(torch.uint8) for ended in self._ended]
        broadcast(self._job.transport, contents, "tower 0's buffers")
        self.write(self._ended)


def _are_equal(value: Tensor, other: Tensor) -> bool:
    return bool(((value == other) | ((value != value) & (other != other))).all())  # NaN equals NaN


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
