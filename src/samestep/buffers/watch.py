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

    Args:
        buffers: those that may not change.
    """

    def __init__(self, buffers: Sequence[NamedBuffer]) -> None:
        self._buffers = buffers
        self._seen: list[tuple[Tensor | None, int]] = []
        self._values: list[tuple[NamedBuffer, Tensor]] = []
        self._is_first_step = True

    def start_step(self) -> None:
        """Note the buffers and their versions."""
        tensors = [buffer.get() for buffer in self._buffers]
        self._seen = [(tensor, _version(tensor)) for tensor in tensors]
        self._values = []
        if self._is_first_step:
            self._values = [
                (buffer, tensor.detach().clone())
                for buffer, tensor in zip(self._buffers, tensors, strict=True)
                if tensor is not None and tensor.is_floating_point() and tensor.dim() == 1
            ]

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a buffer or replaced it since `start_step`.

        Raises:
            BufferPolicyError: names the buffers, and says what to do.
        """
        changed = [
            (buffer, before)
            for buffer, (before, version) in zip(self._buffers, self._seen, strict=True)
            if (now := buffer.get()) is not before or _version(now) != version
        ]
        if changed:
            raise BufferPolicyError(f"{who} {_explain(changed)}")

    def end_step(self) -> None:
        """Check once more, for what a backward changed, and by value in the first step.

        Raises:
            BufferPolicyError: names the buffers, and says what to do.
        """
        self.check("a pass")
        values, self._values, self._is_first_step = self._values, [], False
        changed: list[tuple[NamedBuffer, Tensor | None]] = [
            (buffer, before)
            for buffer, before in values
            if (now := buffer.get()) is not None and not torch.allclose(now, before, 0, 0, equal_nan=True)
        ]
        if changed:
            raise BufferPolicyError(f"a pass {_explain(changed)}")


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _explain(changed: Sequence[tuple[NamedBuffer, Tensor | None]]) -> str:
    frozen = [buffer for buffer, _ in changed if is_statistic(buffer)]
    if frozen:
        return f"changed {_names(frozen)}, of layers in eval mode: switch modes between steps, not within one"
    empty = [buffer for buffer, before in changed if before is None]
    if empty:
        return (
            f"set {_names(empty)}, which was None before: run the model once before making Towers or, if it "
            f"does not affect the weights, use Towers(..., buffers={_argument(empty, 'ignore')})"
        )
    buffers = [buffer for buffer, _ in changed]
    return (
        f"changed {_names(buffers)}, which has no policy: choose one, such as Towers(..., "
        f"buffers={_argument(buffers, 'first')}); 'first' keeps tower 0's value, 'mean' averages over rows, "
        "'ignore' is for buffers that do not affect the weights"
    )


def _names(buffers: Sequence[NamedBuffer]) -> str:
    return ", ".join(buffer.name for buffer in buffers)


def _argument(buffers: Sequence[NamedBuffer], policy: Policy) -> dict[str, Policy]:
    """Return the argument that gives the buffers this policy: by their names, many by the ends of them."""
    if len(buffers) <= _MOST_NAMES:
        return {buffer.name: policy for buffer in buffers}
    return {f"*{buffer.attribute}": policy for buffer in buffers}
