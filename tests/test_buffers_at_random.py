"""Programs whose modules have buffers, and change them anywhere: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

UPDATES = {
    "with torch.no_grad():\n    self.kept.lerp_(x.mean(0), 0.1)": "torch.zeros(8)",
    "self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)": "torch.zeros(8)",
    "self.kept.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)": "torch.zeros(8)",
    "self.kept.data = torch.maximum(self.kept, x.detach().abs().amax(0))": "torch.zeros(8)",
    "self.kept.copy_(x.detach()[-1])": "torch.zeros(8)",
    "self.kept[x.detach().sum(1).argmax() % 8] += 1": "torch.zeros(8)",
    "self.kept.index_add_(0, x.detach().argmax(1), torch.ones(len(x)))": "torch.zeros(8)",
    "self.kept = torch.cat([x.detach(), self.kept])[:5]": "torch.zeros(5, 8)",
    "self.kept = self.kept.roll(1, 0)\nself.kept[0] = x.detach().mean(0)": "torch.zeros(5, 8)",
    "self.kept += 1": "torch.zeros(())",
    "self.kept.add_(len(x))": "torch.zeros((), dtype=torch.long)",
    "self.kept += 1 ": "torch.zeros(1, dtype=torch.long)",
    "if self.training:\n    self.kept.fill_(True)": "torch.tensor(False)",
    "if not self.kept.any():\n    self.kept.copy_(x.detach().std(0))": "torch.zeros(8)",
    "self.kept.bernoulli_(0.5)": "torch.ones(8)",
    "self.kept = (torch.rand(8) < 0.5).float()": "torch.ones(8)",
    "pass": "torch.ones(8)",
}
"""What a forward does with its buffer, and what this is at first."""

USES = [
    *(
        "x",
        "x - self.kept.float().mean()",
        "x * (1 + 0.1 * self.kept.float().mean())",
        "x + 0.01 * self.kept.sum()",
    ),
    *("torch.where(self.kept.sum() > 1, x, x.tanh())", "x if self.kept.sum() > 1 else x.relu()"),
]
"""What it computes from it."""

LAYERS = [
    *("nn.Identity()", "nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=None)", "nn.LayerNorm(8)"),
    *("nn.BatchNorm1d(8, affine=False)", "nn.BatchNorm1d(8, track_running_stats=False)"),
    *(
        "nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
        "nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())",
    ),
    *("nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", "nn.Dropout(0.2)"),
]

IN_PASSES = [
    *("model(x)", "with torch.no_grad():\n    model(x)", "with torch.no_grad():\n    model(x[:2])"),
    "model.eval()\nwith torch.no_grad():\n    model(x)\nmodel.train()",
    *(
        "model[2].kept.zero_()",
        "model[2].kept = torch.zeros_like(model[2].kept)",
        "seen.append(model[2].kept)",
    ),
    *("seen.append(model[2].kept.clone())", "loss = loss + 0.01 * model[2].kept.float().mean()"),
    *(
        "seen.append(model[2].kept.float().sum().item())",
        "loss = loss + 0.01 * model[2].kept.float().mean().item()",
    ),
    "copy.deepcopy(model)(x)",
    "loss = loss + torch.func.functional_call(model, dict(model.named_parameters()), (x,)).mean()",
    "held = {name: each.clone() for name, each in model.named_buffers()}\n"
    "loss = loss + torch.func.functional_call(model, held, (x,)).square().mean()",
    "loss = loss + checkpoint(model, x, use_reentrant=False).square().mean()",
    "for each in model.modules():\n    if isinstance(each, nn.BatchNorm1d):\n"
    "        each.reset_running_stats()",
    *("model.eval()", "model.train()", "model[2].eval()", "count += 1"),
    "model.load_state_dict(model.state_dict())",
    "model.load_state_dict(first, strict=False)",
]
"""What passes do after the loss was computed."""

IF = [
    *("", "", "", "if tower.index == 1:", "if x.sum() > 0:", "if job.rank == 0:", "if step == 1:"),
    *("if count % 2:", "if len(x) > 4:", "if outputs.mean() > 0:", "if torch.rand(()) < 0.5:"),
]

BETWEEN = [
    "for each in model.modules():\n    if isinstance(each, nn.BatchNorm1d):\n"
    "        each.reset_running_stats()",
    "for each in model.modules():\n    if isinstance(each, nn.BatchNorm1d):\n        each.momentum = 0.3",
    "for each in model.modules():\n    if isinstance(each, nn.BatchNorm1d):\n        each.eval()",
    *("model.eval()", "model.train()", "model(torch.ones(4, 6))", "model[2].kept = model[2].kept.clone()"),
    *("model[2].kept.zero_()", "model[2].kept = model[2].kept.float()", "model[2].kept.fill_(report.loss)"),
    "with torch.no_grad():\n    model(torch.ones(4, 6))",
    *(
        "if seen:\n    model[2].kept.fill_(float(torch.as_tensor(seen[-1]).sum()))",
        "model.double()\nmodel.float()",
    ),
    *(
        "model[2].register_buffer('more', torch.zeros(2))",
        "model[2].kept = torch.rand_like(model[2].kept.float())",
    ),
    *("if job.rank == 0:\n    model(torch.ones(4, 6))", "if job.rank == 0:\n    model[2].kept.zero_()"),
    *("model.load_state_dict(first, strict=False)", "first = copy.deepcopy(model.state_dict())"),
    *("model[1] = nn.BatchNorm1d(8)", "model[2] = Keeps()", "model[2].kept.requires_grad_(False)"),
    *(
        "if 2 * count > step:\n    model[2].kept.zero_()",
        "if count > 3:\n    model[4].reset_parameters()",
        "count += 1",
    ),
]

PROGRAM = """import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn({rows}, 6, generator=generator)
    return inputs, torch.randint(3, ({rows},), generator=generator)


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", {first})

    def forward(self, x):
{update}
        return {use}


def program(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), {layer}, Keeps(), {other}, nn.Linear(8, 3))
    first = copy.deepcopy(model.state_dict())
    towers = samestep.Towers(model, {num_towers}, job=job, statistics={statistics!r}, buffers={policies})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen, count = [], 0
    for step in range(3):
        for tower in towers(batch_of(step)):
            x, y = tower.batch
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
{in_pass}
            tower.backward(loss)
        report = towers.average()
        optimizer.step()
{between}
    return samestep.digest(nn.ParameterList(model.parameters()))
"""


def written(seed):
    """Return the code of a program whose modules have buffers."""
    draw = random.Random(seed)
    in_pass, between = ["pass"], ["pass"]
    update, first = draw.choice(list(UPDATES.items()))
    policy = draw.choice(["mean", "mean", "first", "ignore", None])
    use = draw.choice(USES)
    # What Python decides by a buffer that passes do not share, or by the rank after a decision, is not seen.
    decides = "if" in update or "argmax() %" in update or " if " in use
    conditions = [each for each in IF if not (decides and "rank" in each)]
    if decides and policy == "ignore":
        policy = "mean"
    for _ in range(draw.choice([0, 0, 1] if policy == "ignore" else [0, 1, 1, 2])):
        edit, condition = draw.choice(IN_PASSES), draw.choice([""] if policy == "ignore" else conditions)
        in_pass.append(f"{condition}\n{indent(edit, '    ')}" if condition else edit)
    for _ in range(draw.choice([0, 0, 1, 2])):
        between.append(draw.choice(BETWEEN))
    return PROGRAM.format(
        rows=24,
        num_towers=draw.choice([4, 6]),
        first=first,
        update=indent(update, " " * 8),
        use=use,
        layer=draw.choice(LAYERS),
        other=draw.choice(LAYERS),
        statistics=draw.choice(["mean", "mean", "pooled", "first"]),
        policies={} if policy is None else {"2.kept": policy},
        in_pass=indent("\n".join(in_pass), " " * 12),
        between=indent("\n".join(between), " " * 8),
    )


@pytest.mark.parametrize("seed", seeds(300, 1))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"buffers_{seed}.py")
