"""What programs decide by, at random: they are told of what passes have kept, and not of what all share."""

import random
import warnings
from textwrap import indent

import pytest

from .cases import seeds
from .simulation import simulate
from .test_state_at_random import HOLDERS
from .written_code import imported

VALUES = [
    *("loss.item()", "loss.detach()", "{} + loss.item()", "{} + loss.detach()", "x.mean().item()"),
    *("0.9 * {} + 0.1 * loss.item()", "max(0.5 * float({}), loss.item())", "float(outputs.detach().norm())"),
    *("{} + (outputs.argmax(1) == y).sum().item()", "{} + (outputs.argmax(1) == y).float().mean()"),
]
USES = [
    "optimizer.param_groups[0]['lr'] = 0.1 / (1 + abs(float({})))",
    "optimizer.param_groups[0]['weight_decay'] = 0.01 * abs(float({}))",
    "for group in optimizer.param_groups:\n    group['momentum'] = math.exp(-abs(float({})))",
    "for group in optimizer.param_groups:\n    group.update(lr=0.1 * math.exp(-abs(float({}))))",
    "if float({}) > 1.2:\n    optimizer.param_groups[0]['lr'] *= 0.5",
    "set_rate(optimizer, 0.1 / (1 + abs(float({}))))",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + abs(float({}))))",
    "if float({}) > 1.2:\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
    "schedule.base_lrs = [0.1 / (1 + abs(float({})))]\nschedule.step()",
    "plateau.step(float({}))",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 + abs(float({})))",
    "for p in model.parameters():\n    p.grad.mul_(1 / (1 + abs(float({}))))",
    "for p in model.parameters():\n    p.grad /= 1 + abs(float({}))",
    "if float({}) > 1.2:\n    break",
    "with torch.no_grad():\n    model[0].weight.mul_(1 - 0.01 * float({}))",
    "if float({}) > 1.2:\n    model[0].bias.requires_grad_(False)",
    "model[1].p = min(0.5, abs(float({})) / 10)",
    "scale = 1 + 0.1 * float({})",
    "offset = int(10 * float({}))",
]

PROGRAM = """import collections
import dataclasses
import functools
import math
import random
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep

{module}

def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(18, 6, generator=generator)
    return inputs, torch.randint(3, (18,), generator=generator)


def program(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    {prepare}
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    scale, offset = 1.0, 0
    for step in range(2):
        for tower in towers(batch_of(step + offset)):
            x, y = tower.batch
            outputs = model(x)
            loss = F.cross_entropy(outputs, y) * scale
            {keep}
            tower.backward(loss)
        report = towers.average()
        {after}
{use}
        optimizer.step()
"""


def written(seed):
    """Return the code of a program, and whether what it decides by is the same on all workers."""
    draw = random.Random(seed)
    is_shared = draw.random() < 0.25
    # Of a module, what passes keep gives a warning of its own; of a function's argument, no code sets all.
    holders = [each for each in HOLDERS if "model" not in each[1] and "memory" not in each[1]]
    module, prepare, read, write = draw.choice(holders)
    code = PROGRAM.format(
        module=module,
        prepare=prepare.format("1.0"),
        num_towers=draw.choice([4, 6]),
        keep=write.format(draw.choice(VALUES).format(read)),
        after=write.format("report.loss") if is_shared else "pass",
        use=indent(draw.choice(USES).format(read), " " * 8),
    )
    return code, is_shared


@pytest.mark.parametrize("seed", seeds(400, 1))
def test_only_what_is_decided_by_a_workers_own_passes_is_told_of(seed, tmp_path):
    code, is_shared = written(seed)
    module = imported(code, tmp_path / f"decision_{seed}.py")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        simulate(module.program, 1)
    told = [str(each.message) for each in caught]
    found = [each for each in told if "computed from the passes of this worker alone" in each]
    assert bool(found) != is_shared, f"{code}\n{told}"
    assert told == [] or not is_shared, f"{code}\n{told}"
