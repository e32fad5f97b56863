"""Warnings about optimizers that a user's loop steps but that were not passed to `Elastic`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from samestep.errors import warn
from samestep.towers.towers import Towers
from samestep.watching.model.optimizer_steps import stepped

__all__ = ["UnknownOptimizers"]


class UnknownOptimizers:
    """Warns about optimizers that update the models and have a state, but are not among the `kept` objects.

    Args:
        all_towers: the towers of the models.
        kept: the objects whose state is kept; an attribute of one of these may hold an optimizer.
    """

    def __init__(self, all_towers: Sequence[Towers], kept: Sequence[Any]) -> None:
        self._models = [towers.model for towers in all_towers]
        held = [each for one in kept for each in (one, *getattr(one, "__dict__", {}).values())]
        self._known = weakref.WeakSet(each for each in held if isinstance(each, Optimizer))

    def start(self) -> None:
        """Ignore all steps that optimizers have taken before."""
        stepped.clear()

    def look(self) -> None:
        """Check the optimizers that have been stepped since `start` and not been checked yet."""
        for optimizer in [each for each in stepped if each not in self._known]:
            self._known.add(optimizer)
            if optimizer.state and self._updates_model(optimizer):
                warn(
                    f"{type(optimizer).__name__} updates the model but is not part of the state of Elastic: "
                    "a worker that joins would lack its state, and end with different weights; pass it as "
                    "Elastic(..., optimizer=optimizer)"
                )

    def _updates_model(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for model in self._models for parameter in model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
