r"""Small pictures for training and for testing: crop, flip, contrast, standardisation.

Everything after crop and flip is affine in a pixel x. Let m_c be the mean and v_c the variance of the cropped
channel c, M and B the mean and variance of the three m_c, W the mean of the v_c, f the contrast and β the
brightness. The result is

.. math::
    \frac{((x + β) - (m_c + β)) f + (m_c + β) - (M + β)}{s}
    = x \frac{f}{s} + \frac{m_c (1 - f) - M}{s}, \qquad s = \max(\sqrt{f^2 W + B}, 1 / \sqrt{N})

for a picture of N values. The brightness cancels, because nothing is clipped and standardisation subtracts
whatever was added to all values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import ConfigError
from samestep.streams import uniforms

__all__ = ["central_pictures", "check_size", "distort_pictures"]

_CHANNELS, _SIDE = 3, 32
_LOWEST_CONTRAST, _HIGHEST_CONTRAST = 0.2, 1.8
_MID_GREY = 128


def distort_pictures(pictures: NDArray[np.uint8], seeds: NDArray[np.uint64], size: int = 24) -> Tensor:
    """Crop, flip, change brightness and contrast at random, and standardise.

    A crop at a uniform place; a left-right flip with probability 0.5; brightness + U(-63, 63), which is not
    computed, as it has no effect on the result; contrast × U(0.2, 1.8) around each channel's mean; no
    clipping; then, over all N values of the picture, (x - mean) / max(std, 1/√N). The bits of a row depend
    only on its own picture and seed.

    Args:
        pictures: uint8 [n, 3, 32, 32].
        seeds: seeds of the pictures' random streams, uint64 [n].
        size: height and width of the crop, 1 to 32 pixels.

    Returns:
        float32 [n, 3, size, size], channels last in memory.

    Raises:
        ConfigError: another size.

    Example:
        >>> pictures = np.arange(2 * 3 * 32 * 32).astype(np.uint8).reshape(2, 3, 32, 32)
        >>> distorted = distort_pictures(pictures, np.array([7, 8], dtype=np.uint64))
        >>> distorted.shape, distorted.std(dim=(1, 2, 3), correction=0).round(decimals=4)
        (torch.Size([2, 3, 24, 24]), tensor([1., 1.]))

    References:
        The distortions of https://github.com/tensorflow/models/tree/archive/tutorials/image/cifar10
    """
    check_size(size)
    down, right, flip, contrast = uniforms(seeds, 4).T
    crops = _crop(pictures, down, right, size)
    flipped = flip < 0.5
    crops[flipped] = crops[flipped][..., ::-1]
    return _standardise(crops, _LOWEST_CONTRAST + (_HIGHEST_CONTRAST - _LOWEST_CONTRAST) * contrast)


def central_pictures(pictures: NDArray[np.uint8], size: int = 24) -> Tensor:
    """Crop the middle and standardise: over all N values of a picture, (x - mean) / max(std, 1/√N).

    Args:
        pictures: uint8 [n, 3, 32, 32].
        size: height and width of the crop, 1 to 32 pixels.

    Returns:
        float32 [n, 3, size, size], channels last in memory.

    Raises:
        ConfigError: another size.

    Example:
        >>> float(central_pictures(np.full((1, 3, 32, 32), 200, dtype=np.uint8)).abs().max())
        0.0
    """
    check_size(size)
    start = (_SIDE - size) // 2
    crops = pictures[:, :, start : start + size, start : start + size]
    return _standardise(np.ascontiguousarray(crops), np.ones(len(crops)))


def check_size(size: int) -> None:
    """Raise ConfigError if the side of a crop is not 1 to 32 pixels."""
    if not 1 <= size <= _SIDE:
        raise ConfigError(f"picture size = {size}: expected 1 to {_SIDE}, the side of the crop in pixels")


def _crop(
    pictures: NDArray[np.uint8], down: NDArray[np.float64], right: NDArray[np.float64], size: int
) -> NDArray[np.uint8]:
    """Copy one window of each picture, at the place that `down` and `right`, in [0, 1), select."""
    windows = sliding_window_view(pictures, (size, size), axis=(2, 3))  # [n, 3, tops, lefts, size, size]
    tops, lefts = ((chance * (_SIDE - size + 1)).astype(np.int64) for chance in (down, right))
    return windows[np.arange(len(pictures)), :, tops, lefts]


def _standardise(crops: NDArray[np.uint8], contrast: NDArray[np.float64]) -> Tensor:
    """Scale crops, uint8 [n, 3, size, size], around their channels' means by contrast, [n]; standardise."""
    values = torch.from_numpy(crops).to(torch.float32).sub_(_MID_GREY)
    # Squares of -128..127 over 32×32 pixels add up to at most 2²⁴: exact in float32, in any order.
    sums, squares = (v.sum((2, 3)).double().numpy() for v in (values, values.square()))
    near, scale, offset = _affine(sums, squares.sum(axis=1), contrast, crops.shape[-1] ** 2)
    values.sub_(near).mul_(scale).add_(offset)  # three kernels: a fused one may round some rows differently
    return values.contiguous(memory_format=torch.channels_last)


def _affine(
    sums: NDArray[np.float64], squares: NDArray[np.float64], contrast: NDArray[np.float64], pixels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what to subtract, multiply by and add: float32 [n, 3, 1, 1], [n, 1, 1, 1] and [n, 3, 1, 1].

    Args:
        sums: the sum of each channel, [n, 3].
        squares: the sum of squares over all channels, [n].
        contrast: the contrast factor, [n].
        pixels: the number of pixels of a channel.
    """
    count = _CHANNELS * pixels
    total, of_squared_sums = sums.sum(axis=1), (sums * sums).sum(axis=1)
    within = _CHANNELS * (pixels * squares - of_squared_sums)  # count² W, a whole number
    between = _CHANNELS * of_squared_sums - total * total  # count² B, a whole number
    std = np.maximum(np.sqrt(contrast * contrast * within + between) / count, count**-0.5)
    means = sums / pixels
    near = np.rint(means)  # an integer, so subtracting it is exact, and leaves small values for float32
    others = means - (total / count)[:, None]
    offset = ((near - means) * contrast[:, None] + others) / std[:, None]
    return _column(near), _column((contrast / std)[:, None]), _column(offset)


def _column(numbers: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32)[:, :, None, None])
