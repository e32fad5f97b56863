"""A snapshot of a model's buffers, to restore them after a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samestep.summation.layout import unexpanded

__all__ = ["KeptBuffers"]


class KeptBuffers:
    """A snapshot of all buffers of a model: the tensors, and copies of their values."""

    def __init__(self, model: nn.Module) -> None:
        self._registries = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        found = {id(b): b for _, held in self._registries for b in held.values() if b is not None}
        self._buffers = [unexpanded(b) for b in found.values() if not (b.is_inference() or b.is_meta)]
        self._values = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self, *, only_changed: bool = False) -> None:
        """Restore all buffers, changed or not: batch norm writes to its buffers without a new version.

        With `only_changed`, restore those whose bytes have changed, so that the others keep their version.
        """
        for registry, held in self._registries:
            if [*map(id, registry.values())] != [*map(id, held.values())]:
                registry.clear()
                registry.update(held)
        pairs = [*zip(self._buffers, self._values, strict=True)]
        if only_changed:
            pairs = [(buffer, value) for buffer, value in pairs if not _has_bytes_of(buffer, value)]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])


def _has_bytes_of(buffer: Tensor, value: Tensor) -> bool:
    """Say whether bytes are equal: NaN is not itself, and zero has two signs."""
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (buffer, value))
    return torch.equal(first, second)
