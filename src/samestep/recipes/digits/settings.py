"""The options of the recipe; torch is not imported, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from samestep.app.bounds import LearningRate
from samestep.app.settings import Settings

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer
    from samestep.workers.job import Job

__all__ = ["DigitsSettings"]


@dataclass(frozen=True)
class DigitsSettings(Settings):
    """Train a small convolutional net on the built-in handwritten digits."""

    steps: int = 300
    run_dir: Path = Path("runs/digits")
    learning_rate: LearningRate = 0.2
    """Highest learning rate of the one-cycle schedule."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Momentum SGD, or AdamW at a fiftieth of the learning rate."""
    statistics: Literal["mean", "pooled", "first"] = "mean"
    """How batch-norm statistics are combined: the mean over towers, pooled over rows, or those of tower 0."""

    recipe: ClassVar[str] = "digits"

    def build(self, job: Job) -> Trainer:
        """Build the training run."""
        from samestep.recipes.digits.recipe import build

        return build(self, job)
