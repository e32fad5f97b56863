"""Loaders, a recipe, and random numbers from all generators."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import Digits
from samestep.recipes.segmentation.recipe import SegmentationSettings

from ...nets import loss_of
from .batches import batches
from .models import perceptron
from .scenario import scenario


@scenario
def streams_of_all_generators(job: samestep.Job) -> str:

    torch.manual_seed(job.rank)  # what comes before must not matter
    random.seed(job.rank)
    np.random.seed(job.rank)
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 6, job=job)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    for tower in towers(batches(1, 12, 7)[0]):
        noise = float(torch.rand(1)) + random.random() + float(np.random.rand())
        tower.backward(loss_of(model, tower.batch) * noise)
    towers.average()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    return samestep.digest({name: p.grad for name, p in model.named_parameters()})


@scenario
def loader(job: samestep.Job) -> str:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samestep.TowerLoader(Digits("train", augment=True), 250, towers, seed=4)
    rows = []
    for _ in range(2):
        for batch in data:
            for tower in towers(batch):
                pictures, labels = tower.batch
                tower.backward(F.cross_entropy(model(pictures), labels))
            rows.append(towers.average().rows)
            optimizer.step()
    assert rows == [250, 250, 250, 250, 250, 187] * 2
    return samestep.digest(model)


@scenario
def segmentation(job: samestep.Job) -> str:
    """Losses weighted by pixels, batch norm, towers without rows, and pictures that are evaluated in turn."""
    found = []
    for towers, rows, statistics in ((7, 9, "mean"), (5, 4, "pooled")):
        settings = SegmentationSettings(
            towers=towers, batch_size=rows, statistics=statistics, steps=3, crop_size=16, width=2
        )
        experiment = settings.build(job)
        for batch, _ in zip(experiment.loader, range(3), strict=False):
            experiment.step(batch)
        found.append(samestep.digest(experiment.model))
    return str([*found, experiment.measure()])
