"""One file, one experiment, to be read from top to bottom."""

from samestep.app.settings import Settings
from samestep.recipes.cifar10.recipe import Cifar10Settings
from samestep.recipes.digits.recipe import DigitsSettings
from samestep.recipes.segmentation.recipe import SegmentationSettings

__all__ = ["RECIPES"]

RECIPES: dict[str, type[Settings]] = {
    kind.recipe: kind for kind in (DigitsSettings, Cifar10Settings, SegmentationSettings)
}
