"""Copies towers' rows to the device that computes on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.batches.nest import mapped

__all__ = ["Copier", "copied"]


class Copier:
    """Copies rows to a device, one tower after the other.

    For a GPU, rows are copied from pinned memory on a separate stream, to overlap with the previous tower's
    pass. The host waits for the pass before that one, so that the GPU holds at most two towers' rows.

    Args:
        device: the device that computes the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_pass: torch.cuda.Event | None = None

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device; the original may be modified as soon as this returns."""
        if self._stream is None or tensor.device.type != "cpu":
            return tensor.to(self.device, copy=True)
        return self._sent(torch.empty_like(tensor, pin_memory=True).copy_(tensor))

    def moved(self, value: Any) -> Any:
        """Return a nest with its tensors on the device; those already there are not copied."""
        return mapped(lambda each: self._moved(each) if isinstance(each, Tensor) else each, value)

    def wait_for_pass(self) -> None:
        """Wait for the GPU to finish the last pass but one; call this before copying a tower's rows."""
        if self._stream is not None:
            before, self._last_pass = self._last_pass, torch.cuda.current_stream(self.device).record_event()
            if before is not None:
                before.synchronize()

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._stream is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor.to(self.device, non_blocking=True)
        return self._sent(tensor if tensor.is_pinned() else tensor.pin_memory())

    def _sent(self, pinned: Tensor) -> Tensor:
        """Copy while the GPU computes; later kernels on the current stream wait for the copy."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            own = pinned.to(self.device, non_blocking=True)
        current.wait_stream(self._stream)
        own.record_stream(current)
        return own


def copied(array: Tensor | NDArray[Any]) -> Any:
    """Copy a tensor or array into torch's memory, which has the same alignment in every process."""
    if isinstance(array, Tensor):
        return array.clone()
    if type(array) is np.ndarray and array.dtype == object:
        entries = (mapped(copied, entry) for entry in array.flat)
        return np.fromiter(entries, object, array.size).reshape(array.shape)
    if type(array) is not np.ndarray or array.dtype.hasobject or not array.nbytes:
        return array.copy()
    memory = torch.empty(array.nbytes, dtype=torch.uint8, device="cpu").numpy()
    own = memory.view(array.dtype).reshape(array.shape)
    own[...] = array
    return own
