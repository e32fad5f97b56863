"""Semantic segmentation: a class for every pixel, on a folder of pictures or on drawn shapes.

An encoder and a decoder with batch norm and skip connections, Adam, the poly schedule, weight decay on
convolution weights only, and a loss that is the mean over all valid pixels of the batch, across towers. It
reaches a mean intersection over union of about 0.95 on the drawn shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import PolynomialLR

from samestep.app.evaluation import Evaluation
from samestep.app.extras import extra
from samestep.app.trainer import Trainer
from samestep.data.loader import TowerLoader
from samestep.recipes.segmentation.crops import LabelledPictures, RandomCrops, WholePictures
from samestep.recipes.segmentation.panels import label_panels
from samestep.recipes.segmentation.settings import SegmentationSettings
from samestep.recipes.segmentation.shapes import Shapes
from samestep.streams import stream_seed
from samestep.towers.losses import LossSum
from samestep.towers.step import Step
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["SegmentationNet", "SegmentationSettings"]


class SegmentationNet(nn.Module):
    """An encoder that halves the resolution three times, and a decoder with skip connections.

    [n, 3, height, width] -> logits [n, classes, height, width], for pictures of any size.

    Args:
        num_classes: the number of classes.
        width: channels at full resolution; doubled each time the resolution is halved.

    References:
        Ronneberger, Fischer & Brox, "U-Net", 2015, https://arxiv.org/abs/1505.04597, for the skips;
        He et al., "Delving deep into rectifiers", 2015, https://arxiv.org/abs/1502.01852, for the initial
        weights.
    """

    def __init__(self, num_classes: int = 4, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.stem = _convolution(3, width)
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(fine, coarse, stride=2), _convolution(coarse, coarse))
            for fine, coarse in pairwise(widths)
        )
        self.across = nn.ModuleList(_convolution(coarse, fine, size=1) for fine, coarse in pairwise(widths))
        self.up = nn.ModuleList(_convolution(fine, fine) for fine in widths[:-1])
        self.head = nn.Conv2d(width, num_classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert self.head.bias is not None
        nn.init.zeros_(self.head.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits for every pixel."""
        seen = [self.stem(pictures)]
        for down in self.down:
            seen.append(down(seen[-1]))
        features = seen.pop()
        for across, up in zip(reversed(self.across), reversed(self.up), strict=True):
            skip = seen.pop()
            # Convolve before upsampling: a quarter of the work for the same values, as the kernel is 1×1.
            enlarged = F.interpolate(across(features), size=skip.shape[-2:])
            features = up(enlarged + skip)
        logits: Tensor = self.head(features)
        return logits


def _convolution(num_inputs: int, num_outputs: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Return a convolution, batch norm and ReLU; no bias, as batch norm would subtract it."""
    convolution = nn.Conv2d(num_inputs, num_outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_outputs), nn.ReLU())


def build(settings: SegmentationSettings, job: Job) -> Trainer:
    """Build the training run."""
    train, test = _open(settings, "train", job), _open(settings, "test", job)
    step = _make_step(settings, job)
    crops = RandomCrops(train, settings.crop_size, ignore_label=settings.ignore_label)
    processes: dict[str, Any] = {"num_workers": settings.loader_processes}
    processes["persistent_workers"] = settings.loader_processes > 0
    return settings.trainer(
        step,
        TowerLoader(crops, settings.batch_size, step.towers, seed=settings.seed, **processes),
        evaluate=Evaluation(
            WholePictures(test),
            partial(count_pixels, ignore_label=settings.ignore_label),
            metrics=metrics_of,
            rows=1,  # whole pictures may be of any size
        ),
        panels=partial(panels, ignore_label=settings.ignore_label),
        terms=partial(terms_of, weight_decay=settings.weight_decay),
    )


def _open(settings: SegmentationSettings, split: Literal["train", "test"], job: Job) -> LabelledPictures:
    if settings.data_dir is None:
        return Shapes(split, settings.seed, ignore_label=settings.ignore_label)
    with extra("segmentation"):
        from samestep.recipes.segmentation.label_maps import LabelMaps
    maps = LabelMaps(settings.data_dir / split, settings.classes, ignore_label=settings.ignore_label)
    maps.check(job)
    return maps


def _make_step(settings: SegmentationSettings, job: Job) -> Step:
    torch.manual_seed(stream_seed(settings.seed, "weights"))
    model = SegmentationNet(settings.classes, settings.width).to(job.device)
    # The datasets' memory format, and the fastest one for convolutions.
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    towers = Towers(
        model,
        settings.towers,
        job=job,
        seed=settings.seed,
        placement=settings.placement,
        statistics=settings.statistics,
    )
    # Adam, not AdamW: the loss includes the decay, so Adam scales it like the rest of the gradient.
    optimizer = torch.optim.Adam(decayed(model, settings.weight_decay), lr=settings.learning_rate)
    return Step(
        towers,
        partial(loss_of, ignore_label=settings.ignore_label, weight_decay=settings.weight_decay),
        optimizer,
        scheduler=PolynomialLR(optimizer, total_iters=settings.steps, power=settings.power),
        autocast=settings.autocast_dtype,
    )


def loss_of(model: nn.Module, batch: Any, *, ignore_label: int, weight_decay: float) -> LossSum:
    """Return the loss summed over the valid pixels, and their number.

    The loss is cross-entropy plus the weight decay without its gradient, which the optimizer adds.
    """
    pictures, labels = batch
    # One row per pixel: for this shape, the GPU's kernel always adds in the same order.
    logits = model(pictures).permute(0, 2, 3, 1).flatten(0, 2)
    labels = labels.flatten().long()
    num_valid = (labels != ignore_label).sum()
    total = F.cross_entropy(logits, labels, ignore_index=ignore_label, reduction="sum")
    decay = terms_of(model, weight_decay=weight_decay)["weight decay"].detach()
    return LossSum(total + num_valid * decay, num_valid)


def terms_of(model: nn.Module, *, weight_decay: float) -> Mapping[str, Tensor]:
    """Return the part of the loss that depends only on the weights: λ Σ ‖W‖² / 2."""
    squares = [weight.square().sum() for weight in decayed_weights(model)]
    return {"weight decay": torch.stack(squares).sum() * (weight_decay / 2)}


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups that make the optimizer add the gradient of the weight decay."""
    weights = decayed_weights(model)
    chosen = set(weights)
    others = [parameter for parameter in model.parameters() if parameter not in chosen]
    return [{"params": others}, {"params": weights, "weight_decay": weight_decay}]


def decayed_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of convolutions and linear layers, without biases and batch norm."""
    return [layer.weight for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]


def count_pixels(model: nn.Module, batch: Any, *, ignore_label: int) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the confusion matrix of the valid pixels, int64 [classes, classes]: [label, prediction]."""
    pictures, labels = batch
    logits = model(pictures)
    num_classes = logits.shape[1]
    is_valid = labels != ignore_label
    cells = labels[is_valid].long() * num_classes + logits.argmax(dim=1)[is_valid]
    confusion = torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)
    return {"pixels": (confusion, is_valid.sum())}


def metrics_of(totals: Mapping[str, tuple[Tensor, Tensor]]) -> Mapping[str, float]:
    r"""Return the mean over classes of intersection over union, and the share of correct pixels.

    With n_ij the number of pixels of class i predicted as class j,

    .. math:: \mathrm{IoU}_i = \frac{n_{ii}}{\sum_j n_{ij} + \sum_j n_{ji} - n_{ii}}

    The mean leaves out classes that are neither labelled nor predicted.
    """
    confusion, num_pixels = totals["pixels"]
    right = confusion.diagonal().double()
    union = confusion.sum(0) + confusion.sum(1) - right
    of_classes = (right / union)[union > 0]
    return {
        "mean IoU": float(of_classes.mean()),
        "pixel accuracy": float(right.sum() / num_pixels),
    }


def panels(model: nn.Module, batch: Any, *, ignore_label: int) -> Tensor:
    """Return picture, label map, prediction and errors side by side, uint8 [n, 3, height, 4 width]."""
    pictures, labels = batch
    return label_panels(pictures, labels, model(pictures).argmax(dim=1), ignore_label=ignore_label)
