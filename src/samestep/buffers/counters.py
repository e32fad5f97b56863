"""Integer buffers that count, such as `num_batches_tracked` of batch norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.buffers.named_tensors import NamedBuffer
from samestep.buffers.shared import SharedBuffers
from samestep.buffers.statistics import Mode, is_statistic
from samestep.errors import BufferPolicyError
from samestep.workers.job import Job

__all__ = ["Counters", "is_counter"]


def is_counter(buffer: NamedBuffer) -> bool:
    """Return whether a buffer has an integer dtype and one element."""
    tensor = buffer.get()
    if tensor is None or tensor.numel() != 1:
        return False
    return not tensor.is_floating_point() and not tensor.is_complex()


class Counters(SharedBuffers):
    """Integer buffers of one element, such as `num_batches_tracked`.

    Towers send the increment, because float64 cannot represent all integers above 2^53. All towers must
    have the same increment, except in normalisation layers, which some towers may not have used.
    """

    def __init__(self, buffers: Sequence[NamedBuffer], mode: Mode, job: Job) -> None:
        super().__init__(buffers)
        self._mode = mode
        self._start = torch.zeros(len(buffers), dtype=torch.int64, device=job.device)
        self._are_int64 = all(shared.dtype == torch.int64 for shared in self.shared)
        self._of_norms = torch.tensor(
            [is_statistic(buffer) for buffer in buffers], dtype=torch.bool, device="cpu"
        )

    def start_step(self) -> None:
        """Record the shared values."""
        super().start_step()
        self._start = self._flat(self.shared)

    def increments(self) -> Tensor:
        """Return how much this pass has added to the shared values, int64 [counters]."""
        return self._flat(self.values()) - self._start

    def add(self, increments: Tensor) -> None:
        """Add the towers' increments, float64 [towers with rows, counters], to the shared values.

        If they differ, as they may in normalisation layers, add the largest; in mode "first", tower 0's.
        """
        if not self.shared:
            return
        expected = increments[:1].expand_as(increments)
        if increments.device.type == "cpu" and not torch.equal(increments, expected):
            self._check_equal(increments)
        most = increments[0] if self._mode == "first" else increments.amax(dim=0)
        ended = self._start + most.to(torch.int64)
        self.write([value.view_as(b) for value, b in zip(ended.unbind(), self.shared, strict=True)])

    def _flat(self, buffers: Sequence[Tensor]) -> Tensor:
        if not buffers:
            return self._start
        flat = [buffer.reshape(1) for buffer in buffers]
        return torch.cat(flat if self._are_int64 else [each.to(torch.int64) for each in flat])

    def _check_equal(self, increments: Tensor) -> None:
        differ = (increments != increments[:1]) & ~self._of_norms
        if not differ.any():
            return
        tower, column = differ.nonzero()[0].tolist()
        name = self._buffers[column].name
        values = self._start[column] + increments[:, column].to(torch.int64)
        raise BufferPolicyError(
            f"buffer {name} is {int(values[tower])} after tower {tower}, {int(values[0])} after tower 0: "
            "integer buffers must count the same in all towers; to keep tower 0's value, use Towers(..., "
            f"buffers={{{name!r}: 'first'}})"
        )
