"""A snapshot of a model's buffers, to restore them after a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["KeptBuffers", "unexpanded"]


class KeptBuffers:
    """A snapshot of all buffers of a model: the tensors, and copies of their values."""

    def __init__(self, model: nn.Module) -> None:
        self._registries = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        found = {id(b): b for _, held in self._registries for b in held.values() if b is not None}
        self._buffers = [unexpanded(b) for b in found.values() if not (b.is_inference() or b.is_meta)]
        self._values = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all buffers, changed or not: batch norm writes to its buffers without a new version."""
        for registry, held in self._registries:
            if [*map(id, registry.values())] != [*map(id, held.values())]:
                registry.clear()
                registry.update(held)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._values)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return a view with each memory location of an expanded tensor only once, so that it can be written."""
    tensor = tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
