"""The options of the recipe; torch is not imported, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from samestep.app.bounds import LearningRate, LoaderProcesses, Range
from samestep.app.settings import Settings
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer
    from samestep.workers.job import Job

__all__ = ["CLASS_NAMES", "SegmentationSettings"]

CLASS_NAMES = ("background", "circle", "square", "triangle")
"""The names of the labels 0 to 3 of the drawn shapes."""


@dataclass(frozen=True)
class SegmentationSettings(Settings):
    """Train a net that predicts a class for every pixel."""

    batch_size: int = 32
    steps: int = 400
    run_dir: Path = Path("runs/segmentation")
    data_dir: Path | None = None
    """Folder with train and test, each with folders pictures and labels; without it, shapes are drawn."""
    classes: Annotated[int, Range(2, 256)] = len(CLASS_NAMES)
    """Number of classes; labels start at 0."""
    ignore_label: Annotated[int, Range(0, 255)] = 255
    """Label of pixels without a class, which are not counted."""
    crop_size: Annotated[int, Range(16, 4096)] = 48
    """Height and width that training pictures are cropped to, at least 16 pixels."""
    width: Annotated[int, Range(1, 1024)] = 16
    """Channels of the net at full resolution; doubled each time the resolution is halved."""
    learning_rate: LearningRate = 0.005
    """Learning rate of the first step."""
    power: Annotated[float, Range(0, 100)] = 0.9
    """Power of the poly schedule, which multiplies the learning rate by (1 - step / steps) to this power."""
    weight_decay: Annotated[float, Range(0, 10**6)] = 1e-4
    """L2 weight decay of the convolutions: this times half the sum of their squared weights is added to the
    loss."""
    statistics: Literal["mean", "pooled", "first"] = "mean"
    """How batch-norm statistics are combined: the mean over towers, pooled over rows, or those of tower 0."""
    loader_processes: LoaderProcesses = 0
    """Processes that read and crop pictures for each worker; with 0 the worker does it itself."""

    recipe: ClassVar[str] = "segmentation"
    free: ClassVar[frozenset[str]] = Settings.free | {"data_dir", "loader_processes"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None and self.classes != len(CLASS_NAMES):
            raise ConfigError(
                f"--classes {self.classes}: the shapes that are drawn without --data-dir have "
                f"{len(CLASS_NAMES)} classes; leave out --classes, or give --data-dir"
            )

    def build(self, job: Job) -> Trainer:
        """Build the training run."""
        from samestep.recipes.segmentation.recipe import build

        return build(self, job)
