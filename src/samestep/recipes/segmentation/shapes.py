"""Drawn pictures of circles, squares and triangles with label maps, made without files or downloads."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from samestep.errors import ConfigError
from samestep.recipes.segmentation.settings import CLASS_NAMES
from samestep.streams import stream_seed

__all__ = ["CLASS_NAMES", "NUM_TEST", "NUM_TRAIN", "Shapes"]

NUM_TRAIN, NUM_TEST = 1000, 200
"""The number of pictures in each split."""

_SIDE = 64
_MAX_SHAPES = 4
_RADII = (8.0, 14.0)  # from the center to a corner, or to the edge of a circle, in pixels
_MAX_TILT = np.pi / 12
_NUM_CORNERS = {2: 4, 3: 3}
_GREYS = (60.0, 190.0)  # of backgrounds
_MIN_SPREAD = 80.0  # between the highest and the lowest channel of a shape's colour
_NOISE = 12.0  # standard deviation, on the scale of 0 to 255


class Shapes:
    """Pictures of 64×64 pixels with one to four coloured shapes on a grey background, and noise.

    Size, place, colour and a slight tilt are random and independent of the class. Later shapes cover earlier
    ones. Pixels on an outline have a mixed colour and the ignore label.

    Args:
        split: "train" (1,000 pictures) or "test" (200).
        seed: picture i is drawn from the random stream of (seed, split, i).
        ignore_label: the label of pixels without a class.

    Raises:
        ConfigError: `split` is neither.

    Example:
        >>> picture, labels = Shapes("test").read(0)
        >>> picture.shape, picture.dtype, labels.shape, labels.dtype
        ((64, 64, 3), dtype('uint8'), (64, 64), dtype('uint8'))
    """

    def __init__(self, split: Literal["train", "test"], seed: int = 0, *, ignore_label: int = 255) -> None:
        if split not in ("train", "test"):
            raise ConfigError(f"split = {split!r}: expected train or test")
        self._split = split
        self._seed = seed
        self._ignore_label = ignore_label

    def __len__(self) -> int:
        """Return the number of pictures in the split."""
        return NUM_TRAIN if self._split == "train" else NUM_TEST

    def read(self, example: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Draw one picture, uint8 [64, 64, 3], and its label map, uint8 [64, 64]."""
        random = np.random.default_rng(stream_seed(self._seed, f"shapes {self._split}", example))
        picture = np.full((_SIDE, _SIDE, 3), random.uniform(*_GREYS))
        labels = np.zeros((_SIDE, _SIDE), dtype=np.uint8)
        for _ in range(random.integers(1, _MAX_SHAPES + 1)):
            label = int(random.integers(1, len(CLASS_NAMES)))
            distance = _distance(label, random)
            cover = np.clip(0.5 - distance, 0, 1)
            picture = picture + cover[:, :, None] * (_colour(random) - picture)
            labels[cover > 0] = self._ignore_label
            labels[cover == 1] = label
        noisy = picture + random.normal(0, _NOISE, picture.shape)
        return np.clip(noisy, 0, 255).astype(np.uint8), labels


def _distance(label: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw a shape's place, size and angle; return each pixel's distance to the outline, negative inside.

    Beyond a polygon's corners, it is the distance to the line through the farther edge.
    """
    radius = random.uniform(*_RADII)
    middle = random.uniform(_RADII[0], _SIDE - _RADII[0], 2)
    tilt = random.uniform(-_MAX_TILT, _MAX_TILT)
    down, right = (np.arange(_SIDE) - middle[:, None])[:, :, None]
    right = right.T
    if label not in _NUM_CORNERS:
        return np.asarray(np.hypot(down, right) - radius)
    num_corners = _NUM_CORNERS[label]
    normals = np.pi / 2 + tilt + np.arange(num_corners) * (2 * np.pi / num_corners)
    edges = [down * np.sin(normal) + right * np.cos(normal) for normal in normals]
    return np.asarray(np.max(edges, axis=0) - radius * np.cos(np.pi / num_corners))


def _colour(random: np.random.Generator) -> NDArray[np.float64]:
    """Draw a colour that is not close to grey."""
    while True:
        colour = random.uniform(0, 255, 3)
        if np.ptp(colour) >= _MIN_SPREAD:
            return colour
