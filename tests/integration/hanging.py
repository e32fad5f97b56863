"""A recipe for tests: the digits, with loader processes, and a worker that is slow or hangs when told to.

python hanging.py train hanging ...    the command line, with this recipe
"""

import dataclasses
import sys
import time
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

from samestep import Job, TowerLoader, recipes
from samestep.app.trainer import Trainer
from samestep.cli import main
from samestep.recipes.digits.data import Digits
from samestep.recipes.digits.recipe import DigitsSettings, loss_of


@dataclass(frozen=True)
class HangingSettings(DigitsSettings):
    """Train on digits until the last worker hangs."""

    hang: Literal["never", "forward", "loading"] = "never"
    """Where the last worker hangs."""
    hang_at: int = 5
    """In which step."""
    slow_while: Path | None = None
    """While this file exists, a step takes long."""
    slow_s: float = 0.1
    """How long."""
    loader_processes: int = 0
    """As of the recipe cifar10."""

    recipe: ClassVar[str] = "hanging"
    free: ClassVar[frozenset[str]] = DigitsSettings.free | {"slow_while", "slow_s"}

    def build(self, job: Job) -> Trainer:
        """Make the parts of the digits, and put what hangs between them."""
        trainer = super().build(job)
        step, is_last = trainer.step, job.rank == job.world_size - 1

        def loss(model: nn.Module, batch: Any) -> Tensor:
            if is_last and self.hang == "forward" and step.towers.step == self.hang_at:
                time.sleep(1000)
            if self.slow_while is not None and self.slow_while.exists():
                time.sleep(self.slow_s / len(step.towers.placement.towers(job.rank)))
            return loss_of(model, batch)

        step.loss_fn = loss
        first = self.hang_at * self.batch_size if is_last and self.hang == "loading" else None
        loader = TowerLoader(
            Pictures(first), self.batch_size, step.towers, shuffle=False, num_workers=self.loader_processes
        )
        return dataclasses.replace(trainer, loader=loader)


class Pictures:
    """The digits one by one, for loader processes; some of them take forever."""

    def __init__(self, endless: int | None) -> None:
        self.digits = Digits("train", augment=False)
        self.endless = endless

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, example: int) -> Any:
        if self.endless is not None and example >= self.endless:
            time.sleep(1000)
        pictures, labels = self.digits.batch(np.array([example]), np.zeros(1, np.uint64))
        return pictures[0], labels[0]


def add() -> None:
    """Make it a recipe of this process."""
    recipes.RECIPES = ChainMap({"hanging": HangingSettings}, recipes.RECIPES)


if __name__ == "__main__":
    add()
    sys.exit(main())
