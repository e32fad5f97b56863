"""Programs that edit model, gradients or optimizer at any moment: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

EDITS = [
    *("optimizer.zero_grad()", "model.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    "for p in model.parameters():\n    p.grad = None",
    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()",
    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
    "for p in model.parameters():\n    p.grad = torch.zeros_like(p)",
    "for p in model.parameters():\n    p.grad = None if p.grad is None else p.grad.sign()",
    "for p in model.parameters():\n    p.grad = None if p.grad is None else p.grad + torch.randn_like(p)",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    "(0.01 * sum(p.square().sum() for p in model.parameters())).backward()",
    *("saved = [p.grad for p in model.parameters()]", "model[0].weight.grad"),
    "for p, g in zip(model.parameters(), saved):\n    p.grad = g",
    "for p, g in zip(model.parameters(), saved):\n    if None not in (g, p.grad):\n        p.grad.add_(g)",
    *("model[0].bias.requires_grad_(False)", "model[0].bias.requires_grad_(step % 2 == 0)"),
    "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.99)",
    *("model[0].weight.data.clamp_(-0.3, 0.3)", "nn.init.normal_(model[3].bias)"),
    *("model.eval()", "model.train()", "model[1].momentum = 0.2", "model[2].p = 0.2"),
    *("model[0] = nn.Linear(6, 8)", "model[3].weight = nn.Parameter(model[3].weight.detach().clone())"),
    *("model.register_buffer('extra', torch.zeros(2))", "model.add_module('linear', nn.Linear(3, 3))"),
    *("model.double()\nmodel.float()", "model.load_state_dict(averages.state_dict(), strict=False)"),
    *("model(torch.ones(2, 6)).sum()", "with torch.no_grad():\n    model(torch.ones(2, 6))"),
    *("optimizer.step()", "optimizer.state.clear()", "optimizer = torch.optim.SGD(model.parameters(), 0.05)"),
    "optimizer.load_state_dict(optimizer.state_dict())",
    *("optimizer.param_groups[0]['lr'] *= 0.9", "optimizer.param_groups[0]['lr'] = 0.1 / (1 + step)"),
    "averages = copy.deepcopy(model)",
    "with torch.no_grad():\n    averages[0].weight.lerp_(model[0].weight, 0.1)",
    *(
        "averages.load_state_dict(model.state_dict(), strict=False)",
        "for p in averages.parameters():\n    p.requires_grad_(False)",
    ),
    *("torch.manual_seed(step)", "torch.manual_seed(0)", "torch.rand(1)"),
    *("scale *= 0.9", "scale = 1 / (1 + step)", "towers.abandon()", "seen.append(samestep.digest(model))"),
    "model[0].register_forward_hook(lambda _, __, outputs: outputs * 0.9)",
    "model[0].weight.register_hook(lambda gradient: gradient * 0.5)",
]
"""What programs do, at any moment."""

EDITS_OF_LOSS = [
    *(
        "torch.autograd.grad(loss, x.requires_grad_(), allow_unused=True, retain_graph=True)",
        "outputs.retain_grad()",
        "x.requires_grad_()",
    ),
    "gradient = torch.autograd.grad(loss, model[3].weight, create_graph=True)[0]\n"
    "loss = loss + 0.1 * gradient.square().sum()",
    *("loss = loss * scale", "loss = loss + 0.01 * averages(x).detach().sum()", "loss = loss / 2"),
    "loss = loss + F.mse_loss(outputs, averages(x).detach())",
    *(
        "seen.append(loss.item())",
        "seen.append(tower.index)",
        "tower.backward(0.1 * outputs.square().mean())",
    ),
    *("outputs.register_hook(lambda g: g * 0.5)", "outputs.register_hook(lambda g: g.clamp(-0.01, 0.01))"),
    *("loss = loss + 0.01 * model[0].weight.norm()", "with torch.no_grad():\n    averages(x)"),
]
"""What they do between a loss and its backward."""

MOMENTS = {"before_step": 8, "before_pass": 12, "of_loss": 12, "after_pass": 12}
MOMENTS |= {"before_average": 8, "after_average": 8, "after_step": 8}
"""The moments of a step, and how far their code is indented."""

PROGRAM = """import copy

import torch
import torch.nn.functional as F
from torch import nn

import samestep


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn({rows}, 6, generator=generator)
    return inputs, torch.randint(3, ({rows},), generator=generator)


def program(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.{norm}(8), nn.Dropout(0.1), nn.Linear(8, 3))
    averages = copy.deepcopy(model)
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.05)
    seen, scale, saved = [], 1.0, []
    for step in range(3):
{before_step}
        for tower in towers(batch_of(step)):
            x, y = tower.batch
{before_pass}
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
{of_loss}
            tower.backward(loss)
{after_pass}
{before_average}
        report = towers.average()
{after_average}
        optimizer.step()
{after_step}
    return samestep.digest(model)
"""


def written(seed):
    """Return the code of a program with one to three edits."""
    draw = random.Random(seed)
    edits = {moment: ["pass"] for moment in MOMENTS}
    for _ in range(draw.choice([1, 2, 3])):
        moment = draw.choice(list(MOMENTS))
        is_of_loss = moment == "of_loss" and draw.random() < 0.8
        edits[moment].append(draw.choice(EDITS_OF_LOSS if is_of_loss else EDITS))
    return PROGRAM.format(
        rows=draw.choice([18, 24]),
        num_towers=draw.choice([4, 6]),
        norm=draw.choice(["BatchNorm1d", "LayerNorm"]),
        optimizer=draw.choice(["SGD", "Adam", "AdamW"]),
        **{moment: indent("\n".join(edits[moment]), " " * MOMENTS[moment]) for moment in MOMENTS},
    )


@pytest.mark.parametrize("seed", seeds(300, 0))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"edits_{seed}.py", is_seen_alone=True)
