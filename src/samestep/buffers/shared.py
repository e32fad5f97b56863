"""Buffers with shared values: every pass starts from them; after all passes they are updated."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.buffers.named_tensors import NamedBuffer, reader
from samestep.errors import BufferPolicyError
from samestep.workers.collectives import broadcast
from samestep.workers.job import Job

__all__ = ["AveragedBuffers", "FirstBuffers", "SharedBuffers"]


class SharedBuffers:
    """Buffers that start every pass with the same values, whatever the previous pass changed.

    If a pass replaces a buffer's tensor, the new one must have the same shape, dtype and device; afterwards
    the original tensor is put back. No buffer may be None. Subclasses define what each tower contributes, and
    how the contributions are combined.
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
        """Record the shared values, before the first pass."""
        self._homes = self.values()
        if self._homes:
            torch._foreach_copy_(self.shared, self._homes)
        self._fresh = True

    def start_tower(self) -> None:
        """Restore the shared values, before each pass."""
        if not self._fresh:
            self.put_back()
        self._fresh = False

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return the contribution of the tower that just ran, float64 [S]."""
        raise NotImplementedError

    def end_passes(self) -> None:
        """Undo changes to the layers, such as hooks, after the last pass."""

    def finish(self, totals: Tensor, rows: int) -> None:
        """Compute and write the new shared values from the sum over all towers, float64 [S]."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Restore the values from before the step."""
        self.write(self.shared)

    def values(self) -> list[Tensor]:
        """Return the current tensors; raise if a replaced one has another shape, dtype or device."""
        values = self._current()
        if all(map(operator.is_, values, self._homes)):
            return self._homes
        self.check()
        return [value.detach() for value in values if value is not None]

    def changed(self) -> set[str]:
        """Return the names of the buffers whose values differ from the shared ones."""
        pairs = zip(self._buffers, self.values(), self.shared, strict=True)
        return {buffer.name for buffer, value, shared in pairs if not _are_equal(value, shared)}

    def check(self) -> None:
        """Raise if a buffer's shape, dtype or device has changed."""
        for buffer, value, shared in zip(self._buffers, self._current(), self.shared, strict=True):
            if value is None or _kind(value) != _kind(shared):
                found = "None" if value is None else _kind(value)
                raise BufferPolicyError(
                    f"buffer {buffer.name} is {found}, but was {_kind(shared)} when Towers was made: if the "
                    "first forward makes the model's buffers, run the model once before making Towers"
                )

    def write(self, values: Sequence[Tensor]) -> None:
        """Write values to the buffers' original tensors, and put these back in place."""
        if not all(map(operator.is_, self._current(), self._homes)):
            for buffer, home in zip(self._buffers, self._homes, strict=True):
                buffer.module._buffers[buffer.attribute] = home
        if self._homes:
            torch._foreach_copy_(self._homes, list(values))


class AveragedBuffers(SharedBuffers):
    """Buffers whose new value is the towers' mean, weighted by rows; or, with `first_only`, tower 0's."""

    def __init__(self, buffers: Sequence[NamedBuffer], *, first_only: bool = False) -> None:
        super().__init__(buffers)
        self._first_only = first_only
        self.num_values = sum(shared.numel() for shared in self.shared)

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Return the values times the rows; with `first_only`, tower 0's values, and zeros from others."""
        values = torch.cat([value.reshape(-1) for value in self.values()]).double()
        if len(values) != self.num_values:
            self.check()
        if not self._first_only:
            return values.mul_(rows)
        return values if tower == 0 else values.zero_()  # not a product, because 0 times infinity is NaN

    def finish(self, totals: Tensor, rows: int) -> None:
        """Write the mean, or tower 0's values."""
        values = totals if self._first_only else totals / rows
        parts = values.split([shared.numel() for shared in self.shared])
        self.write([part.view_as(shared) for part, shared in zip(parts, self.shared, strict=True)])


class FirstBuffers(SharedBuffers):
    """Buffers whose new value is tower 0's, bit for bit, in any dtype.

    Worker 0, which runs tower 0, broadcasts the bytes at the end of the step. They are not sent with the
    float64 sums, because a queue may be large, and float64 cannot represent every int64.
    """

    def __init__(self, buffers: Sequence[NamedBuffer], job: Job) -> None:
        super().__init__(buffers)
        self._ended = [shared.clone(memory_format=torch.contiguous_format) for shared in self.shared]
        self._job = job

    def contribution(self, tower: int, rows: int) -> Tensor:
        """Copy the values if this is tower 0; contribute nothing to the sums."""
        self.check()
        if tower == 0:
            torch._foreach_copy_(self._ended, self.values())
        return torch.zeros(0, dtype=torch.float64, device=self._job.device)

    def finish(self, totals: Tensor, rows: int) -> None:
        """Broadcast tower 0's values, and write them."""
        contents = [ended.reshape(-1).view(torch.uint8) for ended in self._ended]
        broadcast(self._job.transport, contents, "tower 0's buffers")
        self.write(self._ended)


def _are_equal(value: Tensor, other: Tensor) -> bool:
    return bool(((value == other) | ((value != value) & (other != other))).all())  # NaN equals NaN


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
