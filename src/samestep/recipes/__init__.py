"""One file, one experiment, to be read from top to bottom."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from samestep.app.settings import Settings

__all__ = ["RECIPES"]

_SETTINGS = {
    "digits": "samestep.recipes.digits.settings:DigitsSettings",
    "cifar10": "samestep.recipes.cifar10.settings:Cifar10Settings",
    "segmentation": "samestep.recipes.segmentation.settings:SegmentationSettings",
}
_PACKAGES = ("PIL", "requests", "rich", "tensorboard")  # what the extra `train` installs


class _Recipes(Mapping[str, "type[Settings]"]):
    """The settings of the recipes by name; a recipe, and torch with it, is imported when it is looked up."""

    def __getitem__(self, name: str) -> type[Settings]:
        where = _SETTINGS[name]
        missing = [package for package in _PACKAGES if find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"recipes need packages that are not installed ({', '.join(missing)}): "
                "pip install 'samestep[train]'"
            )
        return cast("type[Settings]", pkgutil.resolve_name(where))

    def __iter__(self) -> Iterator[str]:
        return iter(_SETTINGS)

    def __len__(self) -> int:
        return len(_SETTINGS)


RECIPES: Mapping[str, type[Settings]] = _Recipes()
