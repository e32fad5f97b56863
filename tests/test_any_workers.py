"""Whole steps have the same bits on any number of workers, whatever a model draws, keeps and leaves out."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Step, Towers

from .cases import mostly_long
from .simulation import values

pytestmark = pytest.mark.sampled(5)

NUM_TOWERS = 7
WORKERS = (3, 5)


class Net(nn.Module):
    """Draws from all generators, keeps buffers of all kinds, and leaves out layers in some towers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(4)
        self.seldom = nn.BatchNorm1d(4, momentum=None)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)
        self.seldom_used = nn.Parameter(torch.rand(3))
        self.never_used = nn.Parameter(torch.rand(3))
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("queue", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mean_input", torch.zeros(5))

    def forward(self, x):
        self.queue = self.queue.roll(1)
        self.queue[0] = int(1000 * x[0, 0])
        self.mean_input = 0.9 * self.mean_input + 0.1 * x.mean(0)
        hidden = self.norm(self.first(x).view(-1, 4, 2))
        if x[0, 0] > 0:
            hidden = self.seldom(hidden) * self.seldom_used.sum()
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)
        return self.last(self.dropout(hidden).flatten(1)) + noise


def batch_of(step, rows):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 5, generator=generator)
    return {"x": x, "y": torch.randint(3, (rows,), generator=generator), "valid": x[:, 1] > -0.5}


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def summed_loss(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return samestep.LossSum((losses * batch["valid"]).sum(), batch["valid"].sum())


def named_losses(model, batch):
    out = model(batch["x"])
    losses = F.cross_entropy(out, batch["y"], reduction="none")
    return {"valid": (losses * batch["valid"]).sum(), "rows": 0.1 * out.square().sum()}


def whole_loss(model, outputs, batch):
    likeness = outputs @ outputs.t() / model.temperature.exp()
    return F.cross_entropy(likeness, torch.arange(len(outputs)).roll(1))


COUNTS = {"valid": lambda part: part["valid"].sum(), "rows": lambda part: len(part["x"])}
STEPS = {
    "mean": {"loss_fn": mean_loss},
    "sum": {"loss_fn": summed_loss, "clip_norm": 0.5},
    "named": {"loss_fn": named_losses, "counts": COUNTS},
    "whole batch": {"loss_fn": whole_loss, "forward": lambda model, batch: model(batch["x"])},
    "float16": {"loss_fn": mean_loss, "autocast": torch.float16, "clip_norm": 0.5},
}


def train(job, name, statistics):
    """Return all that four steps leave behind; each worker begins with other weights."""
    torch.manual_seed(job.rank)
    model = Net()
    buffers = {"queue": "first", "mean_input": "mean"}
    towers = Towers(
        model, NUM_TOWERS, job=job, buffers=buffers, statistics=statistics, bucket_bytes=100, noise_every=2
    )
    step = Step(towers, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **STEPS[name])
    found = []
    for number, rows in enumerate((19, 28, 4, 23)):
        report = step(batch_of(number, rows), flags=lambda: 1 << job.rank)
        assert report.flags == (1 << job.world_size) - 1
        assert model.never_used.grad is None
        found.append([report.loss, report.grad_norm, report.noise_scale])
        found.append([str(report.tower_losses), str(report.tower_grad_norms)])
        grads = [p.grad for p in model.parameters()]
        found.append([None if grad is None else grad.view(torch.int32).tolist() for grad in grads])
    return [found, samestep.digest(model), {name: b.tolist() for name, b in model.named_buffers()}]


@pytest.mark.parametrize(
    ("name", "statistics"),
    mostly_long(
        [
            ("mean", "mean"),
            ("named", "pooled"),
            ("whole batch", "mean"),
            ("mean", "first"),
            ("mean", "pooled"),
            ("sum", "mean"),
            ("float16", "pooled"),
        ],
        2,
    ),
)
def test_steps_have_the_same_bits(name, statistics):
    (alone,) = values(lambda job: train(job, name, statistics), 1)
    for num_workers in WORKERS:
        for found in values(lambda job: train(job, name, statistics), num_workers, num_workers):
            assert found == alone
