"""Label maps as pictures, for the summaries."""

from __future__ import annotations

import colorsys
from functools import cache

import torch
from torch import Tensor

__all__ = ["label_panels"]

_GREY = 128
_GOLDEN_RATIO = 0.618034  # multiples of it, modulo 1, give hues that are far apart


def label_panels(pictures: Tensor, labels: Tensor, predicted: Tensor, *, ignore_label: int) -> Tensor:
    """Return picture, label map, prediction and errors side by side.

    Classes have colours, with black for the first; errors are white on black, ignored pixels grey.

    Args:
        pictures: float [n, 3, height, width], in [-1, 1].
        labels: uint8 [n, height, width].
        predicted: int64 [n, height, width], 0 to 255.
        ignore_label: the label of pixels without a class.

    Returns:
        uint8 [n, 3, height, 4 width].

    Example:
        >>> labels = torch.tensor([[[0, 1, 255]]], dtype=torch.uint8)
        >>> pictures, predicted = torch.zeros(1, 3, 1, 3), torch.ones(1, 1, 3, dtype=torch.int64)
        >>> panels = label_panels(pictures, labels, predicted, ignore_label=255)
        >>> panels.shape, panels[0, 0, 0, 9:]
        (torch.Size([1, 3, 1, 12]), tensor([255,   0, 128], dtype=torch.uint8))
    """
    is_ignored = labels == ignore_label
    errors = (255 * (predicted != labels)).masked_fill(is_ignored, _GREY)
    parts = (
        pictures.add(1).mul(127.5).round(),
        _coloured(labels.long()).masked_fill(is_ignored[:, None], _GREY),
        _coloured(predicted),
        errors[:, None].expand(-1, 3, -1, -1),
    )
    return torch.cat([part.to(torch.uint8) for part in parts], dim=3)


def _coloured(labels: Tensor) -> Tensor:
    """Turn int64 [n, height, width] into uint8 [n, 3, height, width]."""
    return _colours().to(labels.device)[labels].permute(0, 3, 1, 2)


@cache
def _colours() -> Tensor:
    """Return a colour for each 8-bit value, uint8 [256, 3]."""
    hues = [colorsys.hsv_to_rgb(value * _GOLDEN_RATIO % 1, 0.8, 1.0) for value in range(1, 256)]
    return torch.tensor([(0.0, 0.0, 0.0), *hues]).mul(255).to(torch.uint8)
