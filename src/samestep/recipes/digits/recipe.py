"""The main example: handwritten digits of 8×8 pixels, with a small convolutional net.

It reaches about 99% on the 360 test digits after 300 steps, in a few seconds on one core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from samestep.app.evaluation import Evaluation
from samestep.app.trainer import Trainer
from samestep.data.loader import TowerLoader
from samestep.recipes.digits.data import Digits
from samestep.recipes.digits.settings import DigitsSettings
from samestep.streams import stream_seed
from samestep.towers.step import Step
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["DigitsNet", "DigitsSettings"]


class DigitsNet(nn.Sequential):
    """Three convolutions with batch norm, then dropout and a linear layer: [rows, 1, 8, 8] -> [rows, 10]."""

    def __init__(self) -> None:
        super().__init__(
            *self._convolution(1, 32),
            *self._convolution(32, 32),
            nn.MaxPool2d(2),  # 4×4
            *self._convolution(32, 64),
            nn.MaxPool2d(2),  # 2×2
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(256, 10),
        )

    @staticmethod
    def _convolution(num_inputs: int, num_outputs: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(num_outputs), nn.ReLU()


def build(settings: DigitsSettings, job: Job) -> Trainer:
    """Build the training run."""
    torch.manual_seed(stream_seed(settings.seed, "weights"))
    model = DigitsNet().to(job.device)
    towers = Towers(
        model,
        settings.towers,
        job=job,
        seed=settings.seed,
        placement=settings.placement,
        statistics=settings.statistics,
    )
    optimizer = _make_optimizer(settings, model)
    highest = [group["lr"] for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, highest, total_steps=settings.steps + 1, cycle_momentum=False)
    step = Step(towers, loss_of, optimizer, scheduler=scheduler, autocast=settings.autocast_dtype)
    loader = TowerLoader(Digits("train", augment=True), settings.batch_size, towers, seed=settings.seed)
    return settings.trainer(step, loader, evaluate=Evaluation(Digits("test", augment=False), accuracy))


def _make_optimizer(settings: DigitsSettings, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate / 50, weight_decay=0.01)
    return torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy over the rows."""
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def accuracy(model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, int]]:
    """Return the number of correct rows, and the number of rows."""
    pictures, labels = batch
    return {"test accuracy": ((model(pictures).argmax(dim=1) == labels).sum(), len(labels))}
