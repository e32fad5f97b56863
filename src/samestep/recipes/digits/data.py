"""The built-in handwritten digits: small enough to come with the package, real enough to train on.

Their source and licence are in `digits.md` beside this file.
"""

from __future__ import annotations

import gzip
import zlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import ConfigError, DataError
from samestep.streams import stream_seed, uniforms

__all__ = ["NUM_TRAIN", "Digits", "load_digits"]

NUM_TRAIN = 1437
"""Pictures in the train split, four fifths of all; the other 360 are the test split."""

_NUM_DIGITS, _SIZE, _BRIGHTEST = 1797, 8, 16
_MEAN, _STD = 4.88, 6.02  # of all pixels, 0..16
_MAX_SHIFT, _MAX_CONTRAST = 1, 0.2
_REMEDY = "install samestep again"


def load_digits(file: Traversable | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read all 1,797 pictures and their labels.

    Args:
        file: gzipped lines of 64 pixels, row by row, and a label; by default the file in this package.

    Returns:
        pictures: uint8 [1797, 8, 8], 0..16; and labels: int64 [1797], 0..9.

    Raises:
        DataError: the file is damaged.

    Example:
        >>> pictures, labels = load_digits()
        >>> pictures.shape, labels[:5]
        ((1797, 8, 8), array([0, 1, 2, 3, 4]))
    """
    file = file if file is not None else resources.files("samestep.recipes.digits") / "digits.csv.gz"
    try:
        lines = gzip.decompress(file.read_bytes()).decode("ascii").splitlines()
        table = np.array([line.split(",") for line in lines], dtype=np.int64)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{file} is not a gzipped table of numbers ({error}): {_REMEDY}") from error
    _check(table, file)
    return table[:, :-1].astype(np.uint8).reshape(-1, _SIZE, _SIZE), table[:, -1]


def _check(table: NDArray[np.int64], file: Traversable) -> None:
    expected = (_NUM_DIGITS, _SIZE * _SIZE + 1)
    if table.shape != expected:
        raise DataError(f"{file} holds a table of shape {table.shape}, expected {expected}: {_REMEDY}")
    highest = np.array([_BRIGHTEST] * (_SIZE * _SIZE) + [9])
    if ((table < 0) | (table > highest)).any():
        raise DataError(f"{file}: expected pixels 0..{_BRIGHTEST} and labels 0..9: {_REMEDY}")


class Digits:
    """Handwritten digits of 8×8 pixels, standardised, in a fixed split of 1,437 and 360.

    Args:
        split: "train" or "test"; a fixed permutation of all pictures assigns them.
        augment: shift each picture by -1, 0 or 1 pixels in both directions and scale its contrast by 0.8 to
            1.2, at random from the example's own stream.

    Raises:
        ConfigError: `split` is neither.
        DataError: the file in this package is damaged.

    Example:
        >>> digits = Digits("test", augment=False)
        >>> pictures, labels = digits.batch(np.arange(3), np.zeros(3, dtype=np.uint64))
        >>> len(digits), pictures.shape, labels.dtype
        (360, torch.Size([3, 1, 8, 8]), torch.int64)
    """

    def __init__(self, split: Literal["train", "test"], augment: bool) -> None:
        if split not in ("train", "test"):
            raise ConfigError(f"split = {split!r}: expected train or test")
        pictures, labels = load_digits()
        order = _permutation()
        chosen = order[:NUM_TRAIN] if split == "train" else order[NUM_TRAIN:]
        self.augment = augment
        self._pictures, self._labels = pictures[chosen], labels[chosen]

    def __len__(self) -> int:
        """Return the number of pictures in the split."""
        return len(self._labels)

    def __getitem__(self, example: int) -> tuple[Tensor, Tensor]:
        """Return one picture, float32 [1, 8, 8], and its label; augmentation draws from torch's generator."""
        seed = torch.randint(2**63 - 1, (1,)).numpy().astype(np.uint64)
        pictures, labels = self.batch(np.array([example]), seed)
        return pictures[0], labels[0]

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Return pictures, float32 [n, 1, 8, 8], and labels, int64 [n].

        Args:
            examples: indices of pictures in the split, int64 [n].
            seeds: seeds of the pictures' random streams, uint64 [n]; unused without `augment`.
        """
        pictures = self._pictures[examples].astype(np.float32)
        if self.augment:
            pictures = _augment(pictures, uniforms(seeds, 3))
        standardised = (pictures - np.float32(_MEAN)) / np.float32(_STD)
        return torch.from_numpy(standardised)[:, None], torch.from_numpy(self._labels[examples])


def _permutation() -> NDArray[np.int64]:
    """Order all pictures by a hash, which does not depend on library versions."""
    return np.array(sorted(range(_NUM_DIGITS), key=lambda picture: stream_seed(0, "digits", picture)))


def _augment(pictures: NDArray[np.float32], chances: NDArray[np.float64]) -> NDArray[np.float32]:
    """Shift and scale pictures, [n, 8, 8], by three random numbers in [0, 1) per picture, [n, 3]."""
    margin = (_MAX_SHIFT, _MAX_SHIFT)
    padded = np.pad(pictures, ((0, 0), margin, margin))
    starts = (chances[:, :2] * (2 * _MAX_SHIFT + 1)).astype(np.int64)
    rows, columns = (starts[:, axis, None] + np.arange(_SIZE) for axis in (0, 1))
    shifted = padded[np.arange(len(pictures))[:, None, None], rows[:, :, None], columns[:, None, :]]
    contrast = 1 + _MAX_CONTRAST * (2 * chances[:, 2] - 1)
    return np.asarray(shifted * contrast[:, None, None], dtype=np.float32)
