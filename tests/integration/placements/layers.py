"""Layers that are unused, tied, frozen, added or cast, and buffers that no weight depends on."""

import numpy as np
import torch
from torch import Tensor, nn

import samestep
from samestep.summation.placement import Placement

from ...nets import take_step
from .batches import batches
from .models import Branches, convnet, perceptron
from .scenario import scenario


@scenario
def unused_tied_frozen_and_mixed_parameters(job: samestep.Job) -> str:
    model = Branches().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    used = []
    for batch in batches(5, 21, 7):
        take_step(towers, batch)
        used.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    assert any("rare.weight" in names for names in used)
    assert not any("never.weight" in names for names in used)
    assert torch.equal(model.never.weight.cpu(), Branches().never.weight)
    return f"{samestep.digest(model)} {used}"


class Thawing(nn.Module):
    """Uses its second norm where a row says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.linear = nn.Linear(7, 5)
        self.norms = nn.ModuleList([nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](self.linear(x))
        return self.norms[1](hidden) if x[0, 0] > 0 else hidden


@scenario
def norms_frozen_on_and_off_and_used_by_some_towers(job: samestep.Job) -> str:
    found = []
    for mode in ("mean", "pooled", "first"):
        model = Thawing().to(job.device)
        towers = samestep.Towers(model, 7, job=job, statistics=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(batches(5, 30, 7)):
            model.norms[0].train(step % 2 == 0)
            model.norms[1].train(step != 2)
            take_step(towers, batch)
            optimizer.step()
        found.append(samestep.digest(model))
    return " ".join(found)


class Watching(nn.Module):
    """Keeps what no weight depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        self.rows_seen += len(x)
        return self.net(x)


@scenario
def ignored_buffers(job: samestep.Job) -> str:
    model = Watching().to(job.device)
    policies = {"largest": "ignore", "rows_seen": "ignore"}
    towers = samestep.Towers(model, 7, job=job, buffers=policies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3, 10, 7):
        take_step(towers, batch)
        optimizer.step()
    mine = [towers.placement.rows(job.rank, rows) for rows in (10, 6, 10)]
    assert model.rows_seen == sum(len(rows) for each in mine for rows in each.values())
    return samestep.digest(dict(model.named_parameters()))


@scenario
def a_model_that_changes(job: samestep.Job) -> str:
    """Other cuts at every step; layers frozen, thawed, added, cast to float64 and back."""
    model = convnet().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    told = []
    for step, batch in enumerate(batches(6, 16, 3, 8, 8)):
        inner = np.random.default_rng((step, job.world_size)).choice(6, job.world_size - 1, replace=False)
        towers.placement = Placement((0, *sorted(inner + 1), 7))
        model[0].requires_grad_(step != 1)
        if step == 3:
            torch.manual_seed(job.rank)  # all take over the first worker's new layer
            model.append(nn.Linear(5, 5).to(job.device))
        model.double() if step == 4 else model.float()
        x = batch["x"].to(next(model.parameters()).dtype)
        told.append(take_step(towers, {**batch, "x": x}).loss)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter -= 0.1 * parameter.grad
    return f"{told} {samestep.digest(model)}"
