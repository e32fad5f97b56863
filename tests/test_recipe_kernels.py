"""No recipe calls what raises on a GPU under deterministic algorithms; seen on a CPU, by operator.

The list is that of torch.use_deterministic_algorithms, in the operators' own names.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.recipes.cifar10 import recipe as cifar10
from samestep.recipes.digits import recipe as digits
from samestep.recipes.lm import recipe as lm
from samestep.recipes.lm.model import Sizes
from samestep.recipes.segmentation import recipe as segmentation

RAISING = {
    *(f"nll_loss2d_{way}" for way in ("forward", "backward")),
    *(f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"_upsample_{mode}_aa_backward" for mode in ("bilinear2d", "bicubic2d")),
    *(f"_adaptive_avg_pool{n}d_backward" for n in (2, 3)),
    *(f"{kind}_max_pool{n}d_backward" for kind in ("adaptive", "fractional") for n in (2, 3)),
    *(f"reflection_pad{n}d_backward" for n in (1, 2, 3)),
    *(f"grid_sampler_{n}d_backward" for n in (2, 3)),
    *(f"max_unpool{n}d" for n in (2, 3)),
    *("avg_pool3d_backward", "_ctc_loss_backward", "put", "put_", "histc", "median", "cumsum", "cumsum_"),
}
ROWS = 6


class Watch(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.removeprefix("aten::")
        has_weights = name == "bincount" and any(weights is not None for weights in args[1:2])
        self.names.add("bincount with weights" if has_weights else name)
        return operator(*args, **(kwargs or {}))


def raising(work):
    """Return what of a piece of work would raise on a GPU."""
    with Watch() as watch:
        work()
    assert watch.names & {"convolution", "bmm", "embedding"}
    return watch.names & {*RAISING, "bincount with weights"}


def batch_of(*shape, num_classes, label_shape=()):
    return torch.randn(ROWS, *shape), torch.randint(num_classes, (ROWS, *label_shape))


CHOSEN = {"ignore_label": 255}
RECIPES = {
    "digits": (digits.DigitsNet, digits.loss_of, digits.accuracy, batch_of(1, 8, 8, num_classes=10)),
    "cifar10": (
        cifar10.Cifar10Net,
        cifar10.loss_of,
        cifar10.precision,
        batch_of(3, 24, 24, num_classes=10),
    ),
    "segmentation": (
        segmentation.SegmentationNet,
        lambda model, batch: segmentation.loss_of(model, batch, **CHOSEN, weight_decay=0.1).total,
        lambda model, batch: segmentation.count_pixels(model, batch, **CHOSEN),
        batch_of(3, 17, 16, num_classes=4, label_shape=(17, 16)),
    ),
    "lm": (
        lambda: lm.GPT(Sizes(9, width=8, depth=1, heads=2, context=5, ngram_slots=7)),
        lambda model, batch: lm.loss_of(model, batch).total,
        lm.nats_of,
        (torch.ones(ROWS, 5).long(), torch.ones(ROWS, 5).long(), torch.arange(5).expand(ROWS, 5)),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_and_counts_with_kernels_that_are_deterministic_on_a_gpu(recipe):
    build, loss_of, count, batch = RECIPES[recipe]
    model = build()

    def work():
        loss_of(model, batch).backward()
        count(model.eval(), batch)

    assert raising(work) == set()


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda x: F.cross_entropy(x, x.argmax(1)), {"nll_loss2d_forward", "nll_loss2d_backward"}),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sum(), {"upsample_bilinear2d_backward"}),
        (lambda x: nn.AdaptiveAvgPool2d(2)(x).sum(), {"_adaptive_avg_pool2d_backward"}),
        (lambda x: nn.AdaptiveAvgPool2d(1)(x).sum(), set()),
        (lambda x: nn.ReflectionPad2d(1)(x).sum(), {"reflection_pad2d_backward"}),
        (lambda x: x.sum() + torch.bincount(torch.arange(3), torch.ones(3)).sum(), {"bincount with weights"}),
        (lambda x: x.sum() + torch.bincount(torch.arange(3), minlength=4).sum(), set()),
    ],
)
def test_what_would_raise_is_seen(use, expected):
    convolution = nn.Conv2d(1, 3, 3)
    assert raising(lambda: use(convolution(torch.randn(2, 1, 8, 8))).backward()) == expected
