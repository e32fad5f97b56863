"""Statistics of the outputs of a model's layers, recorded by temporary forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from samestep.app.loggers.histogram import Histogram

__all__ = ["Output", "layers_of", "outputs_of"]

Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Output:
    """Statistics of a layer's output: the histogram of its values, and the share of zeros."""

    histogram: Histogram | None
    sparsity: float

    @classmethod
    def of(cls, values: Tensor) -> Output:
        """Compute the statistics of a tensor."""
        zeros = 1 - int(values.count_nonzero()) / max(1, values.numel())
        return cls(Histogram.of(values), zeros)


@contextmanager
def outputs_of(layers: Sequence[tuple[str, nn.Module]], guard: Guard) -> Iterator[Mapping[str, Output]]:
    """Record the output of each layer's first call inside the block, which is that in the first tower.

    The statistics are computed inside `guard`, so that an error in them does not end the forward pass.
    """
    found: dict[str, Output] = {}
    handles = [layer.register_forward_hook(_keep_as(name, found, guard)) for name, layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep_as(name: str, found: dict[str, Output], guard: Guard) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_: nn.Module, inputs: Any, output: Any) -> None:
        # Compute at once, because an in-place layer may overwrite the output.
        if name not in found and isinstance(output, Tensor):
            with guard():
                found[name] = Output.of(output)

    return keep


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model's activation functions, and its layers with weights of two or more dimensions.

    Return none for a model with compiled layers, because hooks would cause them to be compiled again.
    """
    layers = dict(model.named_modules())
    if any(hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers.values()):
        return []
    return [(name or type(layer).__name__, layer) for name, layer in layers.items() if _is_recorded(layer)]


def _is_recorded(layer: nn.Module) -> bool:
    has_no_layers = next(layer.children(), None) is None
    is_activation = type(layer).__module__ == nn.ReLU.__module__
    return has_no_layers and (is_activation or any(weight.ndim > 1 for weight in layer.parameters()))
