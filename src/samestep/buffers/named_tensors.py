"""Places in modules that hold buffers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = [
    "NamedBuffer",
    "NamedParameter",
    "NamedTensor",
    "find_named_buffers",
    "find_named_parameters",
    "reader",
]


@dataclass(frozen=True)
class NamedTensor:
    """A buffer or parameter of a module, by attribute, because a forward may replace the tensor."""

    name: str  # as in `model.named_buffers()` or `model.named_parameters()`
    module: nn.Module
    attribute: str

    @property
    def registry(self) -> dict[str, Tensor | None]:
        """The module's dictionary that holds it, by attribute."""
        raise NotImplementedError

    def get(self) -> Tensor | None:
        """Return the current tensor."""
        return self.registry.get(self.attribute)


class NamedBuffer(NamedTensor):
    """A buffer."""

    @property
    def registry(self) -> dict[str, Tensor | None]:
        """The module's dictionary of buffers, by attribute."""
        return self.module._buffers

    @property
    def is_persistent(self) -> bool:
        """Whether it is part of `state_dict`."""
        return self.attribute not in self.module._non_persistent_buffers_set


class NamedParameter(NamedTensor):
    """A parameter."""

    @property
    def registry(self) -> dict[str, Tensor | None]:
        """The module's dictionary of parameters, by attribute."""
        return self.module._parameters  # type: ignore[return-value]


def reader(places: Sequence[NamedTensor]) -> Callable[[], list[Tensor | None]]:
    """Return a function that returns all current tensors; faster than calling `get` of each place."""
    registries, attributes = [place.registry for place in places], [place.attribute for place in places]
    return lambda: list(map(dict.get, registries, attributes))


def find_named_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return the places of `model.named_parameters()`."""
    parameters, seen = [], set()
    for path, module in model.named_modules():
        for attribute, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                parameters.append(NamedParameter(_joined(path, attribute), module, attribute))
                seen.add(id(tensor))
    return parameters


def find_named_buffers(model: nn.Module) -> list[NamedBuffer]:
    """Return the places of `model.named_buffers()`, and of buffers that are still None.

    >>> [buffer.name for buffer in find_named_buffers(nn.Sequential(nn.BatchNorm1d(2)))]
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    buffers, seen = [], set()
    for path, module in model.named_modules():
        for attribute, tensor in module._buffers.items():
            if tensor is None or id(tensor) not in seen:
                buffers.append(NamedBuffer(_joined(path, attribute), module, attribute))
                seen.add(id(tensor))
    return buffers


def _joined(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
