"""A set of tensors, by their identity."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from samestep.watching.operators.operator_calls import tensors_in

__all__ = ["TensorSet"]


class TensorSet:
    """Tensors that were noted; they are kept alive, so that no other one gets their id."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._tensors

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def add(self, result: Any) -> None:
        """Add the tensors in an operator's result."""
        self._tensors.update((id(each), each) for each in tensors_in((result,)))

    def discard(self, tensor: Tensor) -> None:
        """Remove a tensor, if it is there."""
        self._tensors.pop(id(tensor), None)

    def clear(self) -> None:
        """Remove all."""
        self._tensors.clear()
