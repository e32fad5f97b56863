"""Counting labels: the number of items in a loss's mean."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from samestep.app.evaluation import evaluation_mode
from samestep.buffers.kept_buffers import KeptBuffers
from samestep.errors import BatchError, warn
from samestep.streams import keep_globals

__all__ = ["asking", "count_labels", "expecting_labels", "ignores_first", "look_at_loss", "unlike_mean"]

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


@contextlib.contextmanager
def expecting_labels(model: nn.Module, inputs: Mapping[str, Any], names: Sequence[str]) -> Iterator[None]:
    """Explain where labels are expected, if a loss raises and the inputs have none of those names."""
    found = list(inputs)  # a loss may remove some
    try:
        yield
    except ValueError as error:
        if any(name in found for name in names):
            raise
        text = str(error).rstrip(". ")
        raise BatchError(
            f"{text}; the batch has {', '.join(found)}, and none of label_names = {list(names)}: expected "
            f"labels under a name that {type(model).__name__}.forward takes, or a compute_loss that reads "
            "them. Columns that forward does not take are removed, unless TrainingArguments has "
            "remove_unused_columns=False; an evaluation finds labels by label_names, and count_items says "
            "what the loss is a mean over"
        ) from error


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


_MOST_ROWS = 4


def unlike_mean(
    model: nn.Module,
    inputs: Mapping[str, Any],
    loss: Callable[[Any, Tensor | None], Tensor],
    count: Callable[[Any], Tensor | None],
) -> tuple[float, float] | None:
    """Return the loss of some rows and the weighted mean of their single losses, if the two differ.

    Returns None also if nothing can be said: the loss draws random numbers, trains the model, or raises for a
    single row.
    """
    sizes = {len(each) if isinstance(each, Tensor) and each.dim() else 0 for each in inputs.values()}
    rows = range(min(*sizes, _MOST_ROWS)) if len(sizes) == 1 else range(0)
    before, found = _drawn(), []
    try:
        with torch.no_grad(), evaluation_mode(model):
            for part in (rows, *([n] for n in rows)):
                chosen = {name: value[list(part)] for name, value in inputs.items()}
                counted = count(chosen)
                value = loss(chosen, None if counted is None else counted.clamp(min=1))
                found.append((value, len(part) if counted is None else float(counted)))
            trains = model.training  # set by the loss: then batch norm depends on all rows
    except Exception:
        return None
    (whole, total), *each = found
    mean = sum(float(value) * weight for value, weight in each if weight) / total if total else math.nan
    # Rounding differs more in other dtypes than float32.
    tolerance = 1e-4 if whole.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") else 0.02
    is_alike = not abs(float(whole) - mean) > tolerance * abs(mean)  # also if one is NaN
    return None if is_alike or trains or len(rows) < 2 or _drawn() != before else (float(whole), mean)


def look_at_loss(trainer: Any, model: nn.Module, inputs: Any) -> None:
    """Warn of a program's loss that is not the mean over its items.

    Call it after a step: a loss that sends messages to other workers has been refused by then.
    """
    is_own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    if not is_own and trainer.compute_loss_func is None:
        return
    with asking(trainer, model, inputs) as (prepared, loss):
        found = unlike_mean(model, prepared, loss, trainer.count_items)
    if found is not None:
        warn(
            f"compute_loss gives {found[0]:.6g} for some rows, and not {found[1]:.6g}, the mean of their "
            "losses one by one, weighted by count_items: towers are averaged like that, so the average is "
            "not the loss of the whole batch. Override count_items to return what the loss is a mean over, "
            "such as the sum of the labels' class weights, or None for rows"
        )


@contextlib.contextmanager
def asking(trainer: Any, model: nn.Module, inputs: Any) -> Iterator[tuple[Any, Callable[[Any, Any], Any]]]:
    """Yield prepared inputs and a loss function; restore generators and buffers afterwards.

    Otherwise they would differ between workers with rows and workers without.
    """
    buffers = KeptBuffers(model)
    with keep_globals(trainer.job.device), trainer.compute_loss_context_manager():
        yield (
            trainer._prepare_inputs(dict(inputs)),
            lambda changed, count: trainer.compute_loss(model, changed, num_items_in_batch=count),
        )
    buffers.restore(only_changed=True)  # inside a step, a new version would count as a change


def _drawn() -> list[Any]:
    """Return the states of the global generators."""
    return [torch.random.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]


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
