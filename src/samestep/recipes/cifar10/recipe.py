"""A classic of synchronous training: CIFAR-10 with two convolutions and local response normalisation.

The net, the distortions, the schedule and the averaged weights are those of TensorFlow's CIFAR-10 tutorial,
which reached a test accuracy of about 86% after 100,000 steps. Its batch size was per GPU; here it is for all
towers together. The learning rate does not depend on the number of towers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from samestep.app.evaluation import Evaluation
from samestep.app.trainer import Trainer
from samestep.data.loader import TowerLoader
from samestep.recipes.cifar10.convolution import FourierConv2d
from samestep.recipes.cifar10.normalization import FastLocalResponseNorm
from samestep.recipes.cifar10.settings import Cifar10Settings
from samestep.streams import stream_seed
from samestep.towers.step import Step
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["Cifar10Net", "Cifar10Settings", "WeightAverage"]

_WEIGHT_DECAY = 0.004
_DECAYED = ("local3.weight", "local4.weight")
_EPOCH_ROWS = 50_000
_EPOCHS_PER_DECAY = 350


class Cifar10Net(nn.Sequential):
    """Two convolutions and three linear layers: [rows, 3, size, size] -> [rows, 10].

    The first ReLU comes after max-pooling. The two commute, gradients included, and the pooled picture has a
    quarter of the size.

    Args:
        picture_size: height and width of the pictures, in pixels.
    """

    def __init__(self, picture_size: int = 24) -> None:
        layers: dict[str, nn.Module] = {
            "conv1": _start(nn.Conv2d(3, 64, 5, padding=2), 0.05, bias=0.0),
            "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
            "relu1": nn.ReLU(),
            "norm1": FastLocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
            "conv2": _start(FourierConv2d(64, 64, 5, padding=2), 0.05, bias=0.1),
            "relu2": nn.ReLU(),
            "norm2": FastLocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
            "pool2": nn.MaxPool2d(3, stride=2, ceil_mode=True),
            "flatten": _Flatten(),
            "local3": _linear(64 * (picture_size // 4) ** 2, 384, sigma=0.04, bias=0.1),
            "relu3": nn.ReLU(),
            "local4": _linear(384, 192, sigma=0.04, bias=0.1),
            "relu4": nn.ReLU(),
            "softmax_linear": _linear(192, 10, sigma=1 / 192, bias=0.0),
        }
        super().__init__(OrderedDict(layers))

    def weight_decay(self) -> Tensor:
        """Return Σ 0.004 · ‖W‖² / 2 over the weights of the layers local3 and local4."""
        first, second = (self.get_parameter(name).flatten() for name in _DECAYED)
        return (first.dot(first) + second.dot(second)) * (_WEIGHT_DECAY / 2)  # one pass over memory each


class _Flatten(nn.Module):
    """[rows, channels, height, width] -> [rows, features], without a copy for channels-last memory."""

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.permute(0, 2, 3, 1).flatten(1)


def _linear(num_inputs: int, num_outputs: int, *, sigma: float, bias: float) -> nn.Module:
    return _start(nn.Linear(num_inputs, num_outputs), sigma, bias)


def _start(layer: nn.Conv2d | nn.Linear, sigma: float, bias: float) -> nn.Module:
    """Draw the weights from a normal distribution cut off at ±2σ, and set the biases."""
    nn.init.trunc_normal_(layer.weight, std=sigma, a=-2 * sigma, b=2 * sigma)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer


class WeightAverage(AveragedModel):
    r"""The moving average of the weights, starting from the initial ones; torch's averages leave those out.

    .. math:: \bar w \leftarrow d \bar w + (1 - d) w, \qquad
        d = \min\left(0.9999, \frac{1 + n}{10 + n}\right)

    where n counts the updates before this one.
    """

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the averages with the current weights."""
        averages, weights = (tuple(m.parameters()) for m in (self.module, model))
        torch._foreach_lerp_(averages, weights, 1 - self.decay)
        self.n_averaged += 1

    @property
    def decay(self) -> float:
        """The decay of the next update."""
        num_updates = int(self.n_averaged)
        return min(0.9999, (1 + num_updates) / (10 + num_updates))


def build(settings: Cifar10Settings, job: Job) -> Trainer:
    """Build the training run."""
    # Imported here, because the download code takes a while to import.
    from samestep.recipes.cifar10.data import Cifar10, Cifar10Pictures, ensure_cifar10

    folder = ensure_cifar10(settings.data_dir)
    train = Cifar10Pictures(Cifar10("train", folder), distort=True, picture_size=settings.picture_size)
    test = Cifar10Pictures(Cifar10("test", folder), distort=False, picture_size=settings.picture_size)
    step = _make_step(settings, job)
    processes: dict[str, Any] = {"num_workers": settings.loader_processes}
    processes["persistent_workers"] = settings.loader_processes > 0
    loader = TowerLoader(train, settings.batch_size, step.towers, seed=settings.seed, **processes)
    return settings.trainer(step, loader, evaluate=Evaluation(test, precision), terms=terms_of)


def _make_step(settings: Cifar10Settings, job: Job) -> Step:
    torch.manual_seed(stream_seed(settings.seed, "weights"))
    model = Cifar10Net(settings.picture_size).to(job.device)
    towers = Towers(model, settings.towers, job=job, seed=settings.seed, placement=settings.placement)
    optimizer = torch.optim.SGD(decayed(model), lr=settings.learning_rate, fused=True)
    return Step(
        towers,
        loss_of,
        optimizer,
        scheduler=staircase(optimizer, settings.batch_size),
        averaged_model=WeightAverage(model),
        autocast=settings.autocast_dtype,
    )


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups that make the optimizer add the gradient of `Cifar10Net.weight_decay`."""
    named = dict(model.named_parameters())
    weights = [named.pop(name) for name in _DECAYED]
    return [{"params": list(named.values())}, {"params": weights, "weight_decay": _WEIGHT_DECAY}]


def staircase(optimizer: torch.optim.Optimizer, batch_size: int) -> StepLR:
    """Return the schedule: every 350 epochs the learning rate drops to a tenth."""
    num_steps = max(1, _EPOCHS_PER_DECAY * _EPOCH_ROWS // batch_size)
    return StepLR(optimizer, num_steps, gamma=0.1)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean cross-entropy over the rows, plus the weight decay without its gradient.

    The optimizer adds that gradient once a step; computed here, it would take 5% of each tower's time.
    """
    pictures, labels = batch
    assert isinstance(model, Cifar10Net)
    return F.cross_entropy(model(pictures), labels) + model.weight_decay().detach()


def terms_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the part of the loss that depends only on the weights."""
    assert isinstance(model, Cifar10Net)
    return {"weight decay": model.weight_decay()}


def precision(model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, int]]:
    """Return the number of pictures with the right class on top, and the number of pictures."""
    pictures, labels = batch
    return {"precision @ 1": ((model(pictures).argmax(dim=1) == labels).sum(), len(labels))}
