"""A hash of the weights' bytes, one slice in each step.

It finds what version counters do not show: writes through `.data`, and workers whose weights differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from samestep.buffers.named_tensors import find_named_buffers, find_named_parameters
from samestep.identity import checksum_of

__all__ = ["Hashes", "Place", "WeightHash"]

NUM_SLICES = 32
_ALIGNMENT_BYTES = 64
_SLICE_BYTES = 2**12
_SMALL_BYTES = 2**17
"""Buffers without a policy are hashed in every step, the smallest first, up to this many bytes in all."""


class Place(Protocol):
    """A place in a module for a parameter or buffer; a forward may put another tensor there."""

    @property
    def name(self) -> str:
        """As in `model.state_dict()`."""

    def get(self) -> Tensor | None:
        """Return the tensor that is there now."""


@dataclass(frozen=True)
class _Piece:
    place: Place
    elements: slice
    is_fixed: bool


class WeightHash:
    """Hashes one of up to 32 slices of the weights in each step, and some small tensors in every step.

    Args:
        fixed: what a pass must not change: parameters, and buffers without a policy.
        shared: what a pass may change; all workers have the same values at the start of a step.
        always: those of `fixed` to hash in every step, if they are small.
    """

    def __init__(self, fixed: Sequence[Place], shared: Sequence[Place], always: Sequence[Place]) -> None:
        self._always: list[_Piece] = []
        held = 0
        for place in sorted(always, key=_num_bytes):
            held += _num_bytes(place)
            if held <= _SMALL_BYTES:
                self._always.append(_Piece(place, slice(None), is_fixed=True))
        done = {piece.place.name for piece in self._always}
        self._slices = _cut([(p, True) for p in fixed if p.name not in done] + [(p, False) for p in shared])

    @classmethod
    def of_parameters(cls, model: nn.Module) -> WeightHash:
        """Return one of a model's parameters, except subclasses, which may have no memory of their own."""
        places = find_named_parameters(model)
        return cls([each for each in places if _has_memory(each.get())], (), ())

    @classmethod
    def of_module(cls, module: nn.Module, but: Collection[str]) -> WeightHash:
        """Return one of the parameters and buffers of a module beside the model, but those of these names."""
        places: list[Place] = [*find_named_parameters(module), *find_named_buffers(module)]
        return cls([each for each in places if each.name not in but and _has_memory(each.get())], (), ())

    def of(self, step: int, *, fixed_only: bool = False) -> Hashes:
        """Return the hashes of this step's slice, and of what is hashed in every step."""
        pieces = [*self._always, *self._slices[step % len(self._slices)]]
        pairs = [(piece, piece.place.get()) for piece in pieces if piece.is_fixed or not fixed_only]
        return Hashes([(piece, t) for piece, t in pairs if t is not None and t.numel()])

    def by_name(self, *, fixed_only: bool = False) -> dict[str, int]:
        """Return a hash of each whole tensor, by name."""
        found: dict[str, int] = {}
        for index in range(len(self._slices)):
            for name, value in self.of(index, fixed_only=fixed_only).by_name().items():
                found[name] = zlib.crc32(f"{found.get(name)} {value}".encode())
        return found


class Hashes:
    """Hashes of pieces of tensors, by name; on a GPU they are computed asynchronously."""

    def __init__(self, pieces: Sequence[tuple[_Piece, Tensor]] = ()) -> None:
        self._names = [piece.place.name for piece, _ in pieces]
        self._values: list[int] = []
        self.is_ready = not any(tensor.is_cuda for _, tensor in pieces)
        if self.is_ready:
            self._values = [checksum_of(_flat(tensor), piece.elements) for piece, tensor in pieces]
        else:
            parts = [_as_ints(_flat(tensor)[piece.elements]) for piece, tensor in pieces]
            found = torch.stack([torch.hash_tensor(part).view(torch.int64) for part in parts])
            self._copy = found.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def by_name(self) -> dict[str, int]:
        """Return the hashes; on a GPU, wait for them."""
        if not self.is_ready:
            self._copied.synchronize()
            self._values, self.is_ready = self._copy.tolist(), True
        return dict(zip(self._names, self._values, strict=True))


def _cut(places: Sequence[tuple[Place, bool]]) -> list[list[_Piece]]:
    """Cut tensors, laid end to end at multiples of 64 bytes, into slices of equal size."""
    lines = [-(-_num_bytes(place) // _ALIGNMENT_BYTES) for place, _ in places]
    size = max(_SLICE_BYTES, -(-sum(lines) // NUM_SLICES) * _ALIGNMENT_BYTES)
    slices: list[list[_Piece]] = [[] for _ in range(0, sum(lines) * _ALIGNMENT_BYTES, size)]
    end = 0
    for (place, is_fixed), num_lines in zip(places, lines, strict=True):
        begin, end = end, end + num_lines * _ALIGNMENT_BYTES
        for index in range(begin // size, -(-end // size) if num_lines else 0):
            tensor = place.get()
            assert tensor is not None
            start, stop = max(begin, index * size) - begin, min(end, (index + 1) * size) - begin
            elements = slice(start // tensor.element_size(), stop // tensor.element_size())
            slices[index].append(_Piece(place, elements, is_fixed))
    return slices or [[]]


def _num_bytes(place: Place) -> int:
    tensor = place.get()
    return 0 if tensor is None or tensor.layout != torch.strided else tensor.numel() * tensor.element_size()


def _has_memory(tensor: Tensor | None) -> bool:
    """Say whether a tensor has memory of its own, which those of subclasses may not have."""
    return tensor is not None and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements as one row, without a copy if the memory is dense."""
    if tensor.is_contiguous() and not tensor.is_conj():
        return tensor if tensor.is_cpu else tensor.detach().view(-1)
    tensor = tensor.detach()
    if not tensor.is_contiguous() and tensor.stride() == torch.empty_like(tensor, device="meta").stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().resolve_conj().as_strided((tensor.numel(),), (1,))


def _as_ints(flat: Tensor) -> Tensor:
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return flat.view(ints.get(flat.element_size(), torch.int64))
