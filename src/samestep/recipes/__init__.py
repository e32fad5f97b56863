"""The built-in experiments, a folder each, with `recipe.py` to be read from top to bottom."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from samestep.app.settings import Settings

__all__ = ["RECIPES"]

_SETTINGS = {
    "digits": "samestep.recipes.digits.settings:DigitsSettings",
    "cifar10": "samestep.recipes.cifar10.settings:Cifar10Settings",
    "segmentation": "samestep.recipes.segmentation.settings:SegmentationSettings",
    "lm": "samestep.recipes.lm.settings:LmSettings",
}


class _Recipes(Mapping[str, "type[Settings]"]):
    """The recipes' settings classes by name, each imported when it is looked up.

    Includes the entry points that other packages declare in the group `samestep.recipes`.
    """

    def __getitem__(self, name: str) -> type[Settings]:
        if name in _SETTINGS:
            return cast("type[Settings]", pkgutil.resolve_name(_SETTINGS[name]))
        return _load(_entry_points()[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*_SETTINGS, *(name for name in _entry_points() if name not in _SETTINGS)])

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="samestep.recipes")}


def _load(point: EntryPoint) -> type[Settings]:
    from samestep.app.recipe_file import check_class

    try:
        kind = cast("type[Settings]", point.load())
    except Exception as error:
        raise ConfigError(
            f"recipe {point.name}, {point.value}: cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if kind.recipe != point.name:
        raise ConfigError(
            f"recipe {point.name}, {point.value}: has recipe = {kind.recipe!r}, expected {point.name!r}"
        )
    check_class(kind, f"recipe {point.name}, {point.value}")
    return kind


RECIPES: Mapping[str, type[Settings]] = _Recipes()
