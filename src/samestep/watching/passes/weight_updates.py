"""Finds weights outside the model, such as averages of weights, that several passes of a step update."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from samestep.watching.operators.origins import Kept, is_dense, keep_address, storage_of

__all__ = ["WeightUpdates"]

_FEWEST_PASSES = 3
"""Two passes may keep what they compute from weights and from each other, such as a cache."""


class WeightUpdates:
    """What the passes of a step do to weights outside the model.

    A second update in place is seen at once. An update that makes a new tensor of the model's weights, such
    as `shadow[name] = decay * shadow[name] + (1 - decay) * p`, is seen in a third pass.

    Attributes:
        found: what several passes have updated; "" if nothing.
    """

    def __init__(self) -> None:
        self.found = ""
        self._own = 0  # this pass's bit
        self._shared: Container[int] = ()
        self._outside: dict[int, Kept] = {}  # the storages of parameters outside the model
        self._made: dict[int, tuple[Kept, int]] = {}  # the bits of passes whose weights a storage has

    def start_step(self) -> None:
        """Forget the step before."""
        self.found = ""
        self._made.clear()

    def start_pass(self, tower: int, shared: Container[int]) -> None:
        """Follow the pass of the tower with this index; `shared` are the storages of the model's tensors."""
        self._own = 1 << tower
        self._shared = shared
        self._outside.clear()

    def note_parameters(self, given: Iterable[Tensor]) -> None:
        """Note which of an operator's arguments are parameters outside the model."""
        for tensor in given:
            if isinstance(tensor, nn.Parameter):
                storage = storage_of(tensor)
                if storage and storage not in self._shared:
                    self._outside.setdefault(storage, keep_address(tensor))

    def is_outside(self, tensor: Tensor) -> bool:
        """Say whether a tensor is of a parameter outside the model."""
        return storage_of(tensor) in self._outside

    def note_in_place(self, tensor: Tensor, towers: int) -> None:
        """Note an update that the passes of `towers` went into before."""
        if towers & ~self._own:
            self._note(tensor)

    def note_made(self, taken: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """Note tensors that an operator has made of weights of the same shape and of numbers."""
        passes: dict[torch.Size, int] = {}
        for tensor in taken:
            if (bits := self._passes_of(storage_of(tensor))) and is_dense(tensor):
                passes[tensor.shape] = passes.get(tensor.shape, 0) | bits
        for tensor in made if passes else ():
            bits = passes.get(tensor.shape, 0) if is_dense(tensor) and tensor.numel() > 1 else 0
            if bits:
                self._made[storage_of(tensor)] = keep_address(tensor), bits
            if bits.bit_count() >= _FEWEST_PASSES:
                self._note(tensor)

    def _passes_of(self, storage: int) -> int:
        """Return the bits of the passes whose weights a storage has."""
        return self._own if storage in self._shared else self._made.get(storage, (None, 0))[1]

    def _note(self, tensor: Tensor) -> None:
        self.found = f"a tensor of shape {list(tensor.shape)} that is not part of the model"
