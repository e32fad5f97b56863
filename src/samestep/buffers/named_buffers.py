"""Where modules keep their buffers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["NamedBuffer", "find_named_buffers"]


@dataclass(frozen=True)
class NamedBuffer:
    """A place where a module keeps a buffer: a forward may write to the tensor there, or replace it."""

    name: str  # as in `model.named_buffers()`
    module: nn.Module
    attribute: str

    def get(self) -> Tensor | None:
        """Return the tensor that is there now."""
        return self.module._buffers.get(self.attribute)


def find_named_buffers(model: nn.Module) -> list[NamedBuffer]:
    """Return the buffers of `model.named_buffers()`, and those that a forward has yet to fill.

    >>> [buffer.name for buffer in find_named_buffers(nn.Sequential(nn.BatchNorm1d(2)))]
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    buffers, seen = [], set()
    for path, module in model.named_modules():
        for attribute, tensor in module._buffers.items():
            if tensor is None or id(tensor) not in seen:
                buffers.append(NamedBuffer(f"{path}.{attribute}" if path else attribute, module, attribute))
                seen.add(id(tensor))
    return buffers
