"""Parameters and buffers that were added to a model, and that get worker 0's values before the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.summation.layout import unexpanded
from samestep.workers.collectives import broadcast
from samestep.workers.transport import Transport

__all__ = ["NewTensors", "named_tensors"]


class NewTensors:
    """The tensors of a model that workers have not shared yet; at the start, all of them.

    Attributes:
        kinds: shape and dtype of each one, by name.
        version: how often tensors have been added.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: set[object] = set()
        self.kinds: dict[str, str] = {}
        self.version = 0

    def note(self) -> None:
        """Record the parameters and buffers that were added since the last call.

        Parameters are compared by identity, because a new layer may have the name and shape of an old one;
        buffers by module and attribute, because a forward may replace the tensor.
        """
        known, new = self._known, set[int]()
        self._known = set[object]()
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                self._known.add((id(module), name))
                if (id(module), name) not in known:
                    new.add(id(buffer))
            parameters = set(map(id, module._parameters.values()))
            self._known |= parameters
            new |= parameters - known
        found = {n: f"{tuple(t.shape)} {t.dtype}" for n, t in named_tensors(self._model) if id(t) in new}
        self.kinds |= found
        self.version += bool(found)

    @property
    def state(self) -> tuple[int, dict[str, str]]:
        """What the other workers take over in the first step after a regroup."""
        return self.version, self.kinds

    def take_over(self, states: Sequence[tuple[int, dict[str, str]]]) -> None:
        """Take over the `state` of all workers in the first step after a regroup.

        Those that have joined know of none, and some may lack values that others got before one was lost.
        """
        self.version = max(version for version, _ in states)
        self.kinds = {name: kind for _, kinds in states for name, kind in kinds.items()}

    def start_from_first_worker(self, transport: Transport) -> None:
        """Copy worker 0's values to all workers."""
        everything = named_tensors(self._model)
        tensors = [unexpanded(tensor) for name, tensor in everything if name in self.kinds]
        # If a worker is lost meanwhile, the others send these again, from another worker: so into copies, but
        # for the whole model at the start, as no worker can be lost there.
        is_start = len(tensors) == len(everything)
        layout = torch.contiguous_format
        values = [each.contiguous() if is_start else each.clone(memory_format=layout) for each in tensors]
        # As bytes, because no backend supports all dtypes. `as_strided`, because a tensor of one element may
        # have any strides.
        flat = [value.as_strided((value.numel(),), (1,)).view(torch.uint8) for value in values]
        broadcast(transport, flat, "the first worker's weights")
        for tensor, value in zip(tensors, values, strict=True):
            if value is not tensor:
                tensor.copy_(value)
        self.kinds = {}


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a model's parameters and buffers, by name."""
    return [*model.named_parameters(), *model.named_buffers()]
