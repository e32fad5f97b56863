"""Optimizers that a loop of one's own steps, and that `Elastic` was not given."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from samestep.errors import warn
from samestep.towers.towers import Towers
from samestep.watching.outside import stepped

__all__ = ["UnknownOptimizers"]


class UnknownOptimizers:
    """Warns of those that update the models, keep a state, and are not part of what is kept.

    Args:
        all_towers: of the models.
        kept: the parts of the state; an optimizer may be held by one of these.
    """

    def __init__(self, all_towers: Sequence[Towers], kept: Sequence[Any]) -> None:
        self._models = [towers.model for towers in all_towers]
        held = [each for one in kept for each in (one, *getattr(one, "__dict__", {}).values())]
        self._known = weakref.WeakSet(each for each in held if isinstance(each, Optimizer))

    def start(self) -> None:
        """Forget those that have been stepped before."""
        stepped.clear()

    def look(self) -> None:
        """Look at those that have been stepped for the first time."""
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
