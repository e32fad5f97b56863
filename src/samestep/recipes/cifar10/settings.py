"""The options of the recipe; torch is not imported, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from samestep.app.bounds import LearningRate, LoaderProcesses, Range
from samestep.app.settings import Settings

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer
    from samestep.workers.job import Job

__all__ = ["Cifar10Settings"]


@dataclass(frozen=True)
class Cifar10Settings(Settings):
    """Train the net of the classic CIFAR-10 tutorial."""

    towers: int = 4
    batch_size: int = 128
    steps: int = 100_000
    run_dir: Path = Path("runs/cifar10")
    data_dir: Path = Path("data/cifar10")
    """Folder of the pictures; they are downloaded (170 MB) if they are missing."""
    log_every: int = 10
    picture_size: Annotated[int, Range(4, 32)] = 24
    """Height and width that pictures are cropped to, 4 to 32 pixels."""
    learning_rate: LearningRate = 0.1
    """Learning rate of the first 350 epochs; it drops to a tenth every 350 epochs."""
    loader_processes: LoaderProcesses = 0
    """Processes that read and distort pictures for each worker; with 0 the worker does it itself."""

    recipe: ClassVar[str] = "cifar10"
    free: ClassVar[frozenset[str]] = Settings.free | {"steps", "data_dir", "loader_processes"}

    def build(self, job: Job) -> Trainer:
        """Build the training run."""
        from samestep.recipes.cifar10.recipe import build

        return build(self, job)
