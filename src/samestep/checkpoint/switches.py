"""What a program sets on a model without changing a tensor: modes, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from samestep.checkpoint.objects import TrainingObjects
from samestep.identity import uncompiled

__all__ = ["NamedSwitches", "Switches", "all_modules"]

_Setting: TypeAlias = tuple[bool, Mapping[str, bool]]
"""Whether a layer is in training mode, and which of its parameters require grad."""

NamedSwitches: TypeAlias = Mapping[tuple[str, str], _Setting]
"""The settings by module and layer, for another worker."""


class Switches:
    """Which layers are in training mode, and which parameters require grad, to be restored.

    A checkpoint does not restore these, because the program sets them. They are kept by layer, as a program
    may insert layers meanwhile.
    """

    def __init__(self, settings: Mapping[nn.Module, _Setting]) -> None:
        self._settings = settings

    @classmethod
    def now(cls, objects: TrainingObjects) -> Switches:
        """Return the current settings."""
        layers = [layer for module in all_modules(objects).values() for layer in module.modules()]
        return cls({layer: (layer.training, _flags(layer)) for layer in layers})

    @classmethod
    def of(cls, objects: TrainingObjects, named: NamedSwitches) -> Switches:
        """Return another worker's settings, for this one's layers of the same names."""
        names = _names(objects)
        return cls({layer: named[name] for name, layer in names.items() if name in named})

    def restore(self) -> None:
        """Set them as they were."""
        for layer, (is_training, flags) in self._settings.items():
            layer.training = is_training
            for name, parameter in layer._parameters.items():
                if parameter is not None and parameter.requires_grad != flags.get(
                    name, parameter.requires_grad
                ):
                    parameter.requires_grad_(flags[name])

    def by_name(self, objects: TrainingObjects) -> NamedSwitches:
        """Return them for another worker."""
        names = _names(objects)
        return {name: self._settings[layer] for name, layer in names.items() if layer in self._settings}


def all_modules(objects: TrainingObjects) -> dict[str, nn.Module]:
    """Return the modules: the model, under the name "", averages, what `also` adds, and others."""
    named = {**objects.own, **objects.others, "averages": objects.averaged_model}
    others = {name: each for name, each in named.items() if isinstance(each, nn.Module)}
    return {name: uncompiled(module) for name, module in {"": objects.model, **others}.items()}


def _names(objects: TrainingObjects) -> dict[tuple[str, str], nn.Module]:
    return {
        (name, path): layer
        for name, module in all_modules(objects).items()
        for path, layer in module.named_modules()
    }


def _flags(layer: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in layer._parameters.items() if p is not None}
