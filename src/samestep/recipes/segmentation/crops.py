"""Pictures and label maps as inputs of a model: random crops for training, whole pictures for testing."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import BatchError, ConfigError
from samestep.streams import uniforms

__all__ = ["LabelledPictures", "RandomCrops", "WholePictures"]

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
_MID_GREY = 127


class LabelledPictures(Protocol):
    """A source of pictures of any size with their label maps."""

    def __len__(self) -> int:
        """Return the number of pictures."""

    def read(self, example: int) -> Pair:
        """Return one picture, uint8 [height, width, 3], and its label map, uint8 [height, width]."""


class RandomCrops:
    """Random square crops of pictures and label maps, flipped with probability 0.5 (a `BatchedDataset`).

    Place and left-right flip come from the example's own random stream. A picture that is smaller than the
    square is padded at the right and at the bottom, with mid-grey and the ignore label.

    Args:
        source: the pictures and label maps.
        size: height and width of the square, in pixels.
        ignore_label: the label of pixels without a class.

    Raises:
        ConfigError: `size` is below 1.

    Example:
        >>> from samestep.recipes.segmentation.shapes import Shapes
        >>> crops = RandomCrops(Shapes("train"), 48)
        >>> pictures, labels = crops.batch(np.array([5, 9]), np.array([1, 2], dtype=np.uint64))
        >>> pictures.shape, pictures.dtype, labels.shape, labels.dtype
        (torch.Size([2, 3, 48, 48]), torch.float32, torch.Size([2, 48, 48]), torch.uint8)
    """

    def __init__(self, source: LabelledPictures, size: int, *, ignore_label: int = 255) -> None:
        if size < 1:
            raise ConfigError(f"crop size = {size}: expected at least 1 pixel")
        self.source = source
        self.size = size
        self.ignore_label = ignore_label

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.source)

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Return pictures, float32 [n, 3, size, size] in [-1, 1], and labels, uint8 [n, size, size].

        Pictures are channels last in memory.

        Args:
            examples: indices of pictures, int64 [n].
            seeds: seeds of the pictures' random streams, uint64 [n].
        """
        pictures = np.full((len(examples), self.size, self.size, 3), _MID_GREY, dtype=np.uint8)
        labels = np.full((len(examples), self.size, self.size), self.ignore_label, dtype=np.uint8)
        for row, (example, chances) in enumerate(zip(examples.tolist(), uniforms(seeds, 3), strict=True)):
            for values, crop in zip(self.source.read(example), (pictures[row], labels[row]), strict=True):
                part = _cut(values, self.size, chances)
                crop[: part.shape[0], : part.shape[1]] = part
            if chances[2] < 0.5:
                pictures[row], labels[row] = pictures[row, :, ::-1].copy(), labels[row, :, ::-1].copy()
        return _as_tensors(pictures, labels)


class WholePictures:
    """Whole pictures of any size (a `BatchedDataset`).

    All pictures in a batch must have the same size: padding would change what a net sees at their edges.

    Args:
        source: the pictures and label maps.
    """

    def __init__(self, source: LabelledPictures) -> None:
        self.source = source

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.source)

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Return pictures, float32 [n, 3, height, width] in [-1, 1], and labels, uint8 [n, height, width].

        Args:
            examples: indices of pictures, int64 [n].
            seeds: unused.

        Raises:
            BatchError: the pictures have different sizes.
        """
        pictures, labels = zip(*(self.source.read(example) for example in examples.tolist()), strict=True)
        sizes = sorted({values.shape for values in labels})
        if len(sizes) > 1:
            named = ", ".join(f"{height}×{width}" for height, width in sizes)
            raise BatchError(
                f"whole pictures of {named} pixels in one batch: take one at a time, or crop them"
            )
        return _as_tensors(np.stack(pictures), np.stack(labels))


def _cut(values: NDArray[np.uint8], size: int, chances: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the window at a place chosen by two numbers in [0, 1); a side shorter than `size` is kept."""
    top, left = (int(chances[axis] * (max(0, values.shape[axis] - size) + 1)) for axis in (0, 1))
    return values[top : top + size, left : left + size]


def _as_tensors(pictures: NDArray[np.uint8], labels: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    scaled = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
    return scaled, torch.from_numpy(labels)
