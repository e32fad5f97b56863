"""What a model is set to beside its tensors: frozen parameters, layers' modes, plain numbers.

A checkpoint restores tensors. Which layers are frozen, in eval mode, or have which dropout, the program sets
itself; what it changed in the middle of a run, it may not set again when it continues. So checkpoints have a
list of these settings, for the first step after loading to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from samestep.errors import DataError, shown, warn
from samestep.identity import plain_names, uncompiled

__all__ = ["ModelSettings", "Resumed", "settings_of"]

ModelSettings = Mapping[str, Any]

_FLAGS = ("trained", "frozen")
_MODES = ("in training mode", "in eval mode")
_MOST_NAMES = 4


def settings_of(model: nn.Module, in_training: Mapping[nn.Module, bool]) -> ModelSettings:
    """Return a model's settings by name, without those that models mostly have: see `_usual`.

    Args:
        model: the model.
        in_training: the mode in which layers ran; those that are missing count with their present mode.
    """
    return {name: value for name, value in _all(model, in_training).items() if value != _usual(value)}


def _all(model: nn.Module, in_training: Mapping[nn.Module, bool]) -> dict[str, Any]:
    modules = {n: m for n, m in model.named_modules() if uncompiled(m) is m}
    found: dict[str, Any] = {}
    for name, parameter in plain_names(dict(model.named_parameters())).items():
        found[name] = _FLAGS[not parameter.requires_grad]
    for name, module in plain_names(modules).items():
        found[f"layer {name or '(model)'}"] = _MODES[not in_training.get(module, module.training)]
        found |= {f"{name}.{attribute}".lstrip("."): value for attribute, value in _numbers(module)}
    return found


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    is_torchs = type(module).__module__.startswith("torch.")
    kinds = (float,) if is_torchs else (bool, int, float)  # the others of torch's layers are sizes
    for name, value in vars(module).items():
        if type(value) in kinds and name[0] != "_" and name != "training":
            yield name, value


def _usual(value: Any) -> Any:
    """Return what a setting of this kind mostly is; None where that can't be said."""
    return next((kind[0] for kind in (_FLAGS, _MODES) if value in kind), None)


@dataclass(frozen=True)
class Resumed:
    """The settings that a loaded checkpoint was saved with, until the first step after it.

    Attributes:
        saved: those of the checkpoint.
        at_load: the model's when it was loaded.
    """

    saved: ModelSettings
    at_load: ModelSettings

    def __post_init__(self) -> None:
        if not isinstance(self.saved, Mapping) or not all(map(_is_plain, self.saved.items())):
            raise DataError(f"invalid settings of the model: {shown(self.saved)}")

    def compare(self, model: nn.Module, in_training: Mapping[nn.Module, bool], where: str) -> None:
        """Warn of settings that nobody has restored; what was set since loading is the program's choice."""
        found = []
        for name, now in _all(model, in_training).items():
            usual = _usual(now)
            saved, at_load = (each.get(name, now if usual is None else usual) for each in self._both)
            if repr(saved) != repr(now) == repr(at_load):  # where nan equals nan
                found.append(f"{name} {_is(saved)}{saved}, now {now}")
        if found:
            rest = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
            warn(
                f"{where}: the checkpoint was saved with {'; '.join(found[:_MOST_NAMES])}{rest}: loading "
                "does not restore this, and an uninterrupted run would have continued with it; set it "
                "again before the first step"
            )

    @property
    def _both(self) -> Sequence[ModelSettings]:
        return self.saved, self.at_load


def _is(value: Any) -> str:
    return "" if value in (*_FLAGS, *_MODES) else "= "


def _is_plain(entry: tuple[object, object]) -> bool:
    name, value = entry
    return isinstance(name, str) and (value in (*_FLAGS, *_MODES) or type(value) in (bool, int, float))
