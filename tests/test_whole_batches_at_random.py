"""Programs with losses of the whole batch: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

FORWARDS = [
    *(
        "pass",
        "pass",
        "z = F.normalize(z)",
        "z = z * torch.rand(())",
        "z = z + torch.randn_like(z)",
        "calls += 1",
    ),
    *(
        "calls += 1\nz = z * 0.9**calls",
        "z = z - center",
        "center.lerp_(z.detach().mean(0), 0.1)",
        "held.append(z)",
    ),
    *("center.lerp_(z.detach().mean(0), 0.1)\nz = z - center", "z = z + torch.rand(4, generator=generator)"),
    *(
        "z = z * (2 if job.rank == 0 else 1)",
        "held.append(z.detach().mean(0))\nz = z - torch.stack(held).mean(0)",
    ),
    *(
        "x.mul_(0.5)",
        "z = z if z.sum() > 0 else -z",
        "z = z * temperature",
        "x = x + 1",
        "z = z.tanh()\nz = z * 2",
    ),
    *(
        "z = z * random.random()",
        "z = z - z.mean(0)",
        "z = (z, z * 2)[calls % 2]",
        "model.eval()\nmodel.train()",
    ),
    *("z = z.detach()", "z = z.half().float()", "held.append(len(x))\nz = z * len(held)"),
]
"""What a forward does with its outputs."""

LOSSES = [
    *("pass", "pass", "loss = loss * 0.5", "loss = loss + torch.rand(())", "loss = loss * temperature.exp()"),
    *(
        "loss = loss * (2 if job.rank == 0 else 1)",
        "losses.append(loss.item())",
        "center.copy_(z.detach().mean(0))",
    ),
    *("queue = torch.cat([z.detach(), queue])[:16]", "loss = loss + (z @ queue.T).logsumexp(1).mean()"),
    *(
        "loss = loss / (1 + max(losses, default=0))",
        "loss = loss + model[0].weight.square().sum()",
        "z.mul_(0.5)",
    ),
    *("loss = loss + 0.1 * torch.randn_like(z).mul(z).mean()", "loss = loss * random.random()"),
    *("loss = loss + (z - center).square().mean()", "loss = loss + z[torch.randperm(len(z))].mul(z).mean()"),
    *("loss = loss * 0.99**calls", "loss = loss + torch.rand(4, generator=generator).mul(z).mean()"),
    *("loss.backward()", "z.register_hook(lambda g: g * 0.5)", "loss = loss if loss > 1 else loss * 2"),
    *("loss = loss.detach()", "loss = loss + model(y.float()[:, None].expand(-1, 6)).mean()"),
    *("loss = loss + F.mse_loss(z, teacher(x0).detach())", "held.clear()", "calls = 0"),
]
"""What a loss does, beside comparing rows."""

AFTER = [
    *(
        "pass",
        "pass",
        "pass",
        "queue = torch.cat([fixed[:4, :4], queue])[:16]",
        "center.mul_(0.9)",
        "held.clear()",
    ),
    *(
        "center.fill_(report.loss)",
        "temperature.data.clamp_(0, 1)",
        "teacher.load_state_dict(model.state_dict())",
    ),
    *("losses.append(report.loss)", "generator.manual_seed(step)", "calls = 0"),
    *(
        "if held:\n    center.fill_(float(held[-1].sum()) if torch.is_tensor(held[-1]) else 0)",
        "torch.rand(1)",
    ),
]
"""What the program does after a step."""

KINDS = [
    "F.cross_entropy(z @ z.T, torch.arange(len(z)))",
    "torch.cdist(z, z.detach()).mean()",
    "(z.T @ z / len(z) - torch.eye(4)).square().sum()",
    "F.relu(1 + z[:, None] - z[None]).mean()",
    "-z.var(0).log().mean()",
]
"""Losses of the whole batch."""

PROGRAM = """import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

import samestep

fixed = torch.randn(24, 6, generator=torch.Generator().manual_seed(7))


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return {{"x": torch.randn(24, 6, generator=generator), "y": torch.randint(3, (24,), generator=generator)}}


def program(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), {norm}, nn.Dropout({dropout}), nn.Tanh(), nn.Linear(8, 4))
    teacher = copy.deepcopy(model).eval()
    temperature = nn.Parameter(torch.ones(()))
    towers = samestep.Towers(model, {num_towers}, job=job, also=temperature)
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.05)
    generator, center, queue = torch.Generator().manual_seed(0), torch.zeros(4), fixed[:8, :4].clone()
    held, losses, calls = [], [], 0

    def forward(part):
        nonlocal calls, center
        x = part["x"]
        z = model(x)
{forward}
        return z

    def loss_of(z, batch):
        nonlocal queue, calls
        x0, y = batch["x"], batch["y"]
        loss = {kind}
{loss}
        return loss

    for step in range(3):
        towers.whole_batch(batch_of(step), forward, loss_of)
        report = towers.average()
        optimizer.step()
{after}
    return samestep.digest(nn.ParameterList([*model.parameters(), temperature]))
"""


def written(seed):
    """Return the code of a program with a loss of the whole batch."""
    draw = random.Random(seed)
    return PROGRAM.format(
        num_towers=draw.choice([4, 6]),
        norm=draw.choice(["nn.Identity()", "nn.BatchNorm1d(8)", "nn.LayerNorm(8)"]),
        dropout=draw.choice([0, 0.1]),
        kind=draw.choice(KINDS),
        forward=indent(draw.choice(FORWARDS), " " * 8),
        loss=indent("\n".join(draw.choices(LOSSES, k=draw.choice([1, 2]))), " " * 8),
        after=indent(draw.choice(AFTER), " " * 8),
    )


@pytest.mark.parametrize("seed", seeds(200, 0))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"whole_{seed}.py")
