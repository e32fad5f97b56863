"""Warns of gradients that the next step drops before an optimizer has used them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import warn
from samestep.watching.model.watched_tensors import WatchedTensors

__all__ = ["DroppedGradients", "note_optimizer"]

_MOST_STEPS = 16  # in which it is found that gradients are dropped
_MOST_ADDED = 256  # averages that a program may want to add up; a loop that only measures takes more

_watched: weakref.WeakSet[DroppedGradients] = weakref.WeakSet()


class DroppedGradients:
    """Finds gradients in `p.grad` when a step begins, in a worker's first steps, that nothing has used.

    In plain PyTorch, the next backward would add to them: a program may accumulate gradients over several
    batches, or run the backward of a penalty before the loop.

    Args:
        tensors: tell whether a program has changed the weights.
        warns: whether to warn on this worker.
    """

    def __init__(self, tensors: WatchedTensors, *, warns: bool) -> None:
        self._tensors, self._warns = tensors, warns
        self._num_steps = 0
        # Weak, because the program may free gradients, and their ids are used again.
        self._used = _Gradients()  # with which an optimizer has stepped last
        self._averaged = _Gradients()  # that `average` has set last
        self._known: set[int] = set()  # ids of the parameters that have had an average
        self._step = -1  # the last step that has dropped gradients since an optimizer has stepped
        _watched.add(self)

    def start_step(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Look at the gradients that the step drops, before the weights of this step are noted."""
        if self._is_over:
            return
        self._num_steps += 1
        held = [each.grad for each in parameters if each.grad is not None]
        is_early = self._num_steps <= _MOST_STEPS
        if self._step >= 0:
            if not held or (is_early and not _any(held)):  # `zero_grad`: what was dropped was not wanted
                self._step = -1
        elif self._num_steps > 1 and is_early:
            unused = [grad for grad in held if grad not in self._used]
            self._step = step if unused and self._are_wanted(unused) else -1
        self._used.clear()

    def _are_wanted(self, unused: Sequence[Tensor]) -> bool:
        """Whether these gradients have values by which the program has not changed the weights itself.

        Averages of which an optimizer has used another part are not wanted, such as those that the step of a
        generator leaves on its discriminator.
        """
        are_averages = all(grad in self._averaged for grad in unused)
        are_rests = any(each._used and all(grad in each._averaged for grad in unused) for each in _watched)
        is_used = are_rests or (are_averages and self._tensors.have_changed())
        return _any(unused) and _are_finite(unused) and not is_used

    def note_average(self, parameters: Sequence[Tensor]) -> None:
        """Note the gradients that `average` has set."""
        if self._is_over:
            return
        self._used.clear()
        self._averaged.clear()
        self._averaged.note(parameters)
        self._known = set(map(id, parameters))

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Before an optimizer steps: warn, once, if it takes averages that were to be added to others."""
        if self._is_over:
            return
        held = [
            each for group in optimizer.param_groups for each in group["params"] if id(each) in self._known
        ]
        held = [each for each in held if each.grad is not None]
        if not held:
            return
        step, self._step = self._step, -1
        if step < 0 or any(each.grad not in self._averaged for each in held):
            self._used.note(held)
            return
        self._num_steps = _MOST_ADDED
        if self._warns:
            self._warn(type(optimizer).__name__, step)

    def _warn(self, optimizer: str, step: int) -> None:
        warn(
            f"{optimizer}.step() lacks gradients that parameters had before step {step}: towers(batch) "
            "starts without gradients, and average() does not add to them. To accumulate over batches, pass "
            "them as one, with more towers (towers.slices does so for small batches); add gradients of your "
            "own after average(); to drop gradients, call optimizer.zero_grad()"
        )

    @property
    def _is_over(self) -> bool:
        return self._num_steps >= (_MOST_STEPS if self._step < 0 else _MOST_ADDED)


class _Gradients:
    """A set of gradients, known by identity, that keeps none of them alive."""

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients of these parameters."""
        self._held.update({id(each.grad): each.grad for each in parameters if each.grad is not None})

    def clear(self) -> None:
        """Forget them."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, gradient: Tensor) -> bool:
        return id(gradient) in self._held


def note_optimizer(optimizer: Optimizer) -> None:
    """Notify all `DroppedGradients` of this process that an optimizer is about to step."""
    for each in list(_watched):
        each.note_optimizer(optimizer)


def _any(gradients: Iterable[Tensor]) -> bool:
    return any(bool(_values(each).any()) for each in gradients)


def _are_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no value is infinite or NaN, as after an overflow of fp16."""
    return all(bool(torch.isfinite(_values(each)).all()) for each in gradients)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
