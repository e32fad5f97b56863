"""Finds buffers that a pass changed although they have no policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.buffers.named_buffers import NamedBuffer
from samestep.buffers.policies import Policy
from samestep.buffers.statistics import is_statistic
from samestep.errors import BufferPolicyError

__all__ = ["BufferWatch"]

_MOST_NAMES = 4


class BufferWatch:
    """Compares buffers before and after a pass: which tensor each is, and its version counter.

    `F.batch_norm` writes to running statistics without a new version. So the first step also compares the
    values of buffers with one dimension, which could be such statistics.
    """

    def __init__(self, buffers: Sequence[NamedBuffer]) -> None:
        self._buffers = buffers
        self._seen: list[tuple[NamedBuffer, Tensor | None, int]] = []
        self._values: list[tuple[NamedBuffer, Tensor, Tensor]] = []
        self._is_first_step = True

    def start_step(self) -> None:
        """Note the buffers and their versions."""
        tensors = [(buffer, buffer.get()) for buffer in self._buffers]
        self._seen = [(buffer, tensor, _version(tensor)) for buffer, tensor in tensors]
        if self._is_first_step:
            self._values = [
                (buffer, tensor, tensor.detach().clone())
                for buffer, tensor in tensors
                if tensor is not None and tensor.is_floating_point() and tensor.dim() == 1
            ]

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a buffer or replaced it since `start_step`."""
        changed = [
            (buffer, before)
            for buffer, before, version in self._seen
            if (now := buffer.get()) is not before or _version(now) != version
        ]
        if changed:
            empty = [buffer for buffer, before in changed if before is None]
            raise BufferPolicyError(f"{who} {_explain([buffer for buffer, _ in changed], empty)}")

    def end_step(self) -> None:
        """Check once more, for what a backward changed, and by value in the first step."""
        self.check("a pass")
        changed = [
            buffer
            for buffer, now, before in self._values
            if not torch.allclose(now, before, 0, 0, equal_nan=True)
        ]
        self._values, self._is_first_step = [], False
        if changed:
            raise BufferPolicyError(f"a pass {_explain(changed)}")


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _explain(changed: Sequence[NamedBuffer], empty: Sequence[NamedBuffer] = ()) -> str:
    frozen = [buffer for buffer in changed if is_statistic(buffer)]
    if frozen:
        return f"changed {_names(frozen)}, of layers in eval mode: switch modes between steps, not within one"
    if empty:
        return (
            f"set {_names(empty)}, which was None before: run the model once before making Towers or, if it "
            f"does not affect the weights, use Towers(..., buffers={_argument(empty, 'ignore')})"
        )
    return (
        f"changed {_names(changed)}, which has no policy: choose one, such as Towers(..., "
        f"buffers={_argument(changed, 'first')}); 'first' keeps tower 0's value, 'mean' averages over rows, "
        "'ignore' is for buffers that do not affect the weights"
    )


def _names(buffers: Sequence[NamedBuffer]) -> str:
    return ", ".join(buffer.name for buffer in buffers)


def _argument(buffers: Sequence[NamedBuffer], policy: Policy) -> dict[str, Policy]:
    """Return the argument that gives the buffers this policy: by their names, many by the ends of them."""
    if len(buffers) <= _MOST_NAMES:
        return {buffer.name: policy for buffer in buffers}
    return {f"*{buffer.attribute}": policy for buffer in buffers}
