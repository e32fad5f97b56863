"""Counting labels: the number of items in a loss's mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.app.evaluation import evaluation_mode

__all__ = ["count_labels", "ignores_first"]

_IGNORED = -100  # losses of transformers ignore this label


def count_labels(inputs: Mapping[str, Any], *, skip_first: bool) -> Tensor | None:
    """Return the number of integer labels that are not ignored, 0-dim; None without integer labels."""
    labels: Any = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        labels = labels[:, 1:] if skip_first and labels is not None else labels
    return labels.ne(_IGNORED).sum() if _is_integer(labels) else None


def _is_integer(labels: Any) -> bool:
    """Return whether labels are class indices, and not floating-point targets or a list of boxes."""
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def ignores_first(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any, Tensor], Tensor]) -> bool:
    """Return whether a model's loss ignores each row's first label, as in causal language models.

    This compares two losses, because what transformers reports is wrong for some models, such as
    GPT2LMHeadModel.

    Args:
        model: the model; put in evaluation mode during the call.
        inputs: a tower's inputs, on the model's device.
        loss: (inputs, divisor) -> scalar loss.
    """
    labels: Any = inputs.get("labels")
    if not _is_integer(labels) or labels.dim() != 2:
        return False
    try:
        none, one = _losses(model, inputs, loss, torch.full_like(labels, _IGNORED))
    except Exception:  # a user's own loss may fail if all labels are ignored
        none, one = _losses(model, inputs, loss, labels)
    return none == one or (none != none and one != one)  # a mean of nothing is NaN


def _losses(
    model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any, Tensor], Tensor], labels: Tensor
) -> list[float]:
    """Return the loss with each row's first label ignored, and with it set to 0; other labels as given."""
    losses = []
    for first in (_IGNORED, 0):
        changed = labels.clone()
        changed[:, 0] = first
        with torch.no_grad(), evaluation_mode(model):
            losses.append(float(loss({**inputs, "labels": changed}, torch.ones_like(labels[0, 0]))))
    return losses
