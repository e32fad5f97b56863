"""Trainers with callbacks, and functions that an Elastic calls, at random: told of what own passes decide."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .test_decisions_at_random import VALUES
from .test_state_at_random import HOLDERS
from .written_code import imported, ran

IN_LOSSES = [
    "loss = loss * (1 + 0.1 * {})",
    "if float({}) > 1000:\n    loss = loss * 2",
    *["pass"] * 2,
]
DECISIONS = [
    "optimizer.param_groups[0]['lr'] = 0.1 / (1 + abs(float({})))",
    "for group in optimizer.param_groups:\n    group['lr'] *= math.exp(-abs(float({})))",
    "with torch.no_grad():\n    model[0].weight.mul_(1 - 0.01 * float({}))",
    "model[1].p = min(0.5, abs(float({})) / 10)",
    "if float({}) > 1.2:\n    torch.save(model.state_dict(), os.devnull)",
    "if float({}) > 1000:\n    model[0].bias.requires_grad_(False)",
    "loader.dataset.scale = 1 + 0.1 * float({})",
    *["seen.append(float({}))"] * 3,  # decides nothing
]

PROGRAM = """import collections
import dataclasses
import functools
import math
import os
import random
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep

{module}

class Data(torch.utils.data.Dataset):
    scale = 1.0

    def __len__(self):
        return 36

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator) * self.scale, torch.randint(3, (), generator=generator)


def program(job, run_dir):
    random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    {prepare}
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = samestep.TowerLoader(Data(), 18, towers)
    seen = []

{run}
    return samestep.digest(model)
"""
TRAINER = """def loss_of(model, batch):
    {shared}
    x, y = batch
    outputs = model(x)
    loss = F.cross_entropy(outputs, y)
{in_loss}
    {keep}
    return loss

class Own(samestep.Callback):
    def before_step(self, trainer, batch):
        {shared}
        {before_step}

    def after_step(self, trainer, report):
        {shared}
        {after_step}
{decision}

step = samestep.Step(towers, loss_of, optimizer)
samestep.Trainer(step, loader, run_dir=run_dir, steps=3, callbacks=[Own()], log_every=100).run()
"""
ELASTIC = """def take_step(batch):
    {shared}
    {before_step}
    for tower in towers(batch):
        x, y = tower.batch
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
{in_loss}
        {keep}
        tower.backward(loss)
    report = towers.average()
    {after_step}
{decision}
    optimizer.step()

with samestep.Elastic(model=model, towers=towers, loader=loader, optimizer=optimizer) as elastic:
    for _ in range(2):
        for batch in loader:
            elastic(take_step, batch)
"""


def written(seed):
    """Return the code of a program, and whether the weights may depend on the number of workers."""
    draw = random.Random(seed)
    # As in the tests of other decisions.
    holders = [each for each in HOLDERS if "model" not in each[1] and "memory" not in each[1]]
    module, prepare, read, write = draw.choice(holders)
    in_loss, decision = draw.choice(IN_LOSSES), draw.choice(DECISIONS)
    is_set_in = draw.choice(["", "in_loss", "before_step", "after_step"])
    places = dict.fromkeys(["in_loss", "before_step", "after_step"], "pass")
    if is_set_in:
        places[is_set_in] = write.format("report.loss" if is_set_in == "after_step" else "1.0")
    name = write.partition(" = ")[0]
    run, depths = draw.choice([(TRAINER, (4, 8)), (ELASTIC, (8, 4))])
    in_loss_code = f"{places.pop('in_loss')}\n{in_loss.format(read)}"
    run = run.format(
        shared=f"nonlocal {name}" if name in ("kept", "read") else "pass",
        keep=write.format(draw.choice(VALUES).format(read)),
        in_loss=indent(in_loss_code, " " * depths[0]),
        decision=indent(decision.format(read), " " * depths[1]),
        **places,
    )
    code = PROGRAM.format(
        module=module,
        prepare=prepare.format("1.0"),
        num_towers=draw.choice([4, 6]),
        run=indent(run, "    "),
    )
    is_carried = in_loss != "pass" and is_set_in != "in_loss"
    return code, is_carried or ("seen" not in decision and is_set_in != "after_step")


@pytest.mark.parametrize("seed", seeds(200, 0))
def test_what_depends_on_a_workers_own_passes_is_told_of(seed, tmp_path):
    code, depends = written(seed)
    module = imported(code, tmp_path / f"callbacks_{seed}.py")
    digests = set()
    for num_workers in (1, 2, 3):
        run_dir = tmp_path / str(num_workers)
        found = ran(lambda job, run_dir=run_dir: module.program(job, run_dir), num_workers)
        digests |= found.values
        assert bool(found.told) == depends, f"{num_workers} workers\n{code}\n{found.told}"
    assert depends or len(digests) == 1
