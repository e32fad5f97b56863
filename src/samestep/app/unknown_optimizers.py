"""Optimizers that a loop of one's own steps, and that `Elastic` was not given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from samestep.towers.towers import Towers

__all__ = ["UnknownOptimizers"]


class UnknownOptimizers:
    """Warns of those that update the models, keep a state, and are not part of what is kept.

    Args:
        all_towers: of the models.
        kept: the parts of the state; an optimizer may be held by one of these.
    """

    def __init__(self, all_towers: Sequence[Towers], kept: Sequence[Any]) -> None:
        self._models = [towers.model for towers in all_towers]
        self._kept = {id(each) for one in kept for each in (one, *getattr(one, "__dict__", {}).values())}
        self._hook: RemovableHandle | None = None

    def watch(self) -> None:
        """Warn of them, until `stop`."""
        self._hook = register_optimizer_step_post_hook(self._look)

    def stop(self) -> None:
        """Warn no more."""
        if self._hook is not None:
            self._hook.remove()

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._kept or not optimizer.state:
            return
        self._kept.add(id(optimizer))  # it is told of once
        own = {id(parameter) for model in self._models for parameter in model.parameters()}
        if own & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
            warnings.warn(
                f"{type(optimizer).__name__} updates the model and is not part of the state of Elastic: a "
                "worker that joins would go on without what it keeps, and end in other weights; pass it, as "
                "Elastic(..., optimizer=optimizer)",
                stacklevel=2,
            )
