"""Whole training runs with each option of `Towers` and `Step`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep

from ...nets import loss_of
from .batches import batches
from .models import MEMORIES, Memories, convnet, perceptron
from .scenario import SCENARIOS, scenario


def every_norm() -> nn.Module:
    torch.manual_seed(9)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6, affine=False),
        nn.InstanceNorm2d(6, track_running_stats=True),
        nn.Unflatten(2, (2, 4)),
        nn.BatchNorm3d(6, momentum=None),
        nn.InstanceNorm3d(6, track_running_stats=True, affine=True, momentum=0.3),
        nn.Flatten(2),
        nn.BatchNorm1d(6),
        nn.InstanceNorm1d(6, track_running_stats=True),
        nn.BatchNorm1d(6).eval(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 64, 5),
    )
    model(torch.randn(2, 3, 8, 8))
    return model


def spectral() -> nn.Module:
    torch.manual_seed(10)
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, stride=2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.utils.spectral_norm(nn.Linear(36, 20), n_power_iterations=2),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(20, 5)),
    )


def wide_gradients() -> nn.Module:
    """Return bfloat16 parameters whose gradients are float32."""
    model = perceptron(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


@dataclass(frozen=True)
class Run:
    """One small training run."""

    num_towers: int
    build: Callable[[], nn.Module] = convnet
    rows: int = 30
    shape: tuple[int, ...] = (3, 8, 8)
    optimizer: str = "sgd"
    autocast: torch.dtype | None = None
    statistics: str = "mean"
    buffers: Mapping[str, str] = field(default_factory=dict)
    bucket_bytes: int = 4000
    dtype: torch.dtype = torch.float32
    accumulate_dtype: torch.dtype | None = None

    def __call__(self, job: samestep.Job) -> str:
        model = self.build().to(job.device)
        towers = samestep.Towers(
            model,
            self.num_towers,
            job=job,
            seed=3,
            statistics=self.statistics,
            buffers=self.buffers,
            bucket_bytes=self.bucket_bytes,
            accumulate_dtype=self.accumulate_dtype,
        )
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        step = samestep.Step(
            towers,
            loss_of,
            optimizer,
            clip_norm=1.0,
            autocast=self.autocast,
            scheduler=schedule,
            averaged_model=average,
        )
        losses = [step(batch).loss for batch in batches(3, self.rows, *self.shape, dtype=self.dtype)]
        buffers = samestep.digest(dict(model.named_buffers()))  # those that the model does not save, too
        return f"{samestep.digest(model)} {samestep.digest(average)} {buffers} {losses}"


mlp = partial(Run, build=perceptron, shape=(7,), rows=48)


RUNS = {
    **{f"convnet, {towers} towers": Run(towers) for towers in (4, 7, 16)},
    **{f"perceptron, {towers} towers": mlp(towers, optimizer="adamw") for towers in (4, 7, 8, 13)},
    "one bucket": Run(7, bucket_bytes=2**25),
    "pooled statistics": Run(7, statistics="pooled"),
    "first tower's statistics": Run(7, statistics="first"),
    **{
        f"every norm, {mode}": Run(7, every_norm, 10, statistics=mode) for mode in ("mean", "pooled", "first")
    },
    "spectral norm": Run(7, spectral, 10, buffers={"*_[uv]": "first"}),
    "own buffers": Run(7, Memories, 10, (7,), buffers=MEMORIES),
    "own buffers, the first tower's": Run(8, Memories, 30, (7,), buffers={"*": "first"}),
    "adamw": Run(8, optimizer="adamw"),
    "bf16 autocast, sgd": Run(8, autocast=torch.bfloat16),
    "bf16 autocast, adamw": Run(7, autocast=torch.bfloat16, optimizer="adamw"),
    "fp16 autocast": Run(7, autocast=torch.float16),
    "fewer rows than towers": Run(7, rows=4, build=perceptron, shape=(7,)),
    "float64": mlp(7, build=partial(perceptron, torch.float64), dtype=torch.float64),
    "bf16 parameters": mlp(7, build=partial(perceptron, torch.bfloat16), dtype=torch.bfloat16),
    "bf16 parameters, fp32 gradients": mlp(7, build=wide_gradients, dtype=torch.bfloat16),
    "bf16 parameters summed in fp32": mlp(
        7, build=partial(perceptron, torch.bfloat16), dtype=torch.bfloat16, accumulate_dtype=torch.float32
    ),
}


SCENARIOS.update(RUNS)


@scenario
def flags(job: samestep.Job) -> str:
    """The first and the last worker set different bits, and are asked once a step."""
    towers = samestep.Towers(perceptron().to(job.device), 7, job=job, bucket_bytes=300)
    asked: list[int] = []

    def answer() -> int:
        asked.append(towers.step)
        mine = (job.rank == 0) | 2 * (job.rank == job.world_size - 1)
        return mine if towers.step != 1 else 0

    heard = []
    for batch in batches(3, 4, 7):  # fewer rows than towers
        for tower in towers(batch, flags=answer):
            tower.backward(loss_of(towers.model, tower.batch))
        heard.append(towers.average().flags)
    return f"{heard} {asked}"
