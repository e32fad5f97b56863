"""Programs that draw random numbers, at random: they are told of it if the weights depend on the workers."""

import random
from textwrap import indent

import numpy as np
import pytest
import torch

from .cases import seeds
from .written_code import imported, ran

GENERATORS = [
    ("", "torch.rand(()).item()", "torch.randn_like({})", "torch.manual_seed({})"),
    ("", "F.dropout(torch.ones(())).item()", "F.dropout({})", "torch.manual_seed({})"),
    ("", "random.random()", "random.gauss(0, 1) * torch.ones_like({})", "random.seed({})"),
    ("", "np.random.rand()", "torch.from_numpy(np.random.randn(*{}.shape)).float()", "np.random.seed({})"),
    ("", "np.random.beta(0.4, 0.4)", "np.random.normal() * {}", "np.random.seed({})"),
    (
        "generator = torch.Generator().manual_seed(3)",
        "torch.rand((), generator=generator).item()",
        "torch.randn({}.shape, generator=generator)",
        "generator.manual_seed({})",
    ),
    ("own = random.Random(5)", "own.random()", "own.gauss(0, 1) * torch.ones_like({})", "own.seed({})"),
    ("model.own = random.Random(5)", "model.own.random()", "model.own.random() * {}", "model.own.seed({})"),
    (
        "own = np.random.default_rng(5)",
        "float(own.random())",
        "torch.from_numpy(own.standard_normal(tuple({}.shape))).float()",
        "own = np.random.default_rng({})",
    ),
    ("own = np.random.RandomState(5)", "own.rand()", "own.randn() * {}", "own.seed({})"),
    (
        "normal = torch.distributions.Normal(0.0, 1.0)",
        "normal.sample().item()",
        "normal.sample({}.shape)",
        "torch.manual_seed({})",
    ),
    ("draws = iter(np.random.default_rng(1).random(1000))", "float(next(draws))", "next(draws) * {}", "pass"),
    ("draws = [random.random() for _ in range(500)]", "draws.pop()", "draws.pop() * {}", "pass"),
    ("draws = [random.random() for _ in range(500)]", "draws[step]", "draws[step] * {}", "pass"),
]
"""How a program prepares a generator, draws a number or values like those of a tensor, and seeds it anew."""

USES = [
    ("before_loss", "x = x + 0.1 * {values}"),
    ("before_loss", "if {number} < 0.5:\n    x = x.flip(1)"),
    ("before_loss", "y = (y + int(3 * abs({number}))) % 3"),
    ("before_loss", "share = {number}\nx = share * x + (1 - share) * x[torch.randperm(len(x))]"),
    ("before_loss", "x = torch.cat([x[:, :3], x[:, 3:] * {number}], 1)"),
    ("after_loss", "loss = loss * (1 + 0.1 * {number})"),
    ("after_loss", "if {number} < 0.5:\n    loss = loss + outputs.abs().mean()"),
    ("after_loss", "outputs.register_hook(lambda gradient: gradient * (1 + 0.1 * {number}))"),
    ("prepare", "model[0].register_forward_hook(lambda _, __, out: out * (1 + 0.1 * {number}))"),
    ("prepare", "model[0].register_forward_pre_hook(lambda _, args: (args[0] + 0.1 * {of_args},))"),
    ("before_step", "inputs = inputs + 0.1 * {of_inputs}"),
    ("before_step", "order = sorted(range({rows}), key=lambda row: {number})\ninputs = inputs[order]"),
    (
        "after_step",
        "with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(1 - 0.01 * {number})",
    ),
    ("after_step", "for p in model.parameters():\n    p.grad.mul_(1 + 0.1 * {number})"),
    ("after_step", "optimizer.param_groups[0]['lr'] = 0.1 * abs({number})"),
]
"""Where a program draws, and for what."""

SEEDS = [
    *[("", "")] * 4,
    ("before_step", "step"),
    ("before_loss", "step"),
    ("before_loss", "7"),
    ("before_loss", "100 * step + tower.index"),
]
"""Where it seeds anew, and by what."""

PASS = """{before_loss}
outputs = model(x)
loss = F.cross_entropy(outputs, y)
{after_loss}
"""
LOOP = """for step in range({num_steps}):
    inputs, labels = batch_of(step)
    {before_step}
    for tower in towers((inputs, labels)):
        x, y = tower.batch
{pass_in_loop}
        tower.backward(loss)
    towers.average()
    {after_step}
    optimizer.step()
"""
STEP = """def loss_of(model, batch):
    {shared}
    x, y = batch
{pass_}
    return loss

def edit(*_):
    {shared}
    {after_step}

optimizer.register_step_pre_hook(edit)
take_step = samestep.Step(towers, loss_of, optimizer)
for step in range({num_steps}):
    inputs, labels = batch_of(step)
    {before_step}
    take_step((inputs, labels))
"""
WHOLE = """def forward(batch):
    {shared}
    x, y = batch
{pass_}
    return torch.cat([outputs, loss.expand(len(x), 1)], 1)

for step in range({num_steps}):
    inputs, labels = batch_of(step)
    {before_step}
    towers.whole_batch((inputs, labels), forward, lambda found, _: found.square().mean())
    towers.average()
    {after_step}
    optimizer.step()
"""

PROGRAM = """import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn({rows}, 6, generator=generator)
    return inputs, torch.randint(3, ({rows},), generator=generator)


def program(job):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    {make}
    {prepare}
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{steps}
    return samestep.digest(model)
"""


def written(seed):
    """Return the code of a program."""
    draw = random.Random(seed)
    make, number, values, reseed = draw.choice(GENERATORS)
    steps, rows = draw.choice([LOOP, STEP, WHOLE]), draw.choice([18, 24])
    place, use = draw.choice(USES)
    place_of_seed, by = draw.choice([each for each in SEEDS if steps is LOOP or "tower" not in each[1]])
    of = {each: values.format(name) for each, name in (("of_args", "args[0]"), ("of_inputs", "inputs"))}
    places = dict.fromkeys(["prepare", "before_step", "before_loss", "after_loss", "after_step"], "pass")
    places[place] = use.format(number=number, values=values.format("x"), rows=rows, **of)
    if by:
        places[place_of_seed] = f"{reseed.format(by)}\n{places[place_of_seed]}"
    pass_ = PASS.format(**places)
    depth = 8 if steps is LOOP else 4
    nested = {name: code.replace("\n", "\n    ") for name, code in places.items()}
    shared = "nonlocal own" if make.startswith("own = np.random.default_rng") else "pass"
    steps = steps.format(
        pass_=indent(pass_, " " * 4),
        pass_in_loop=indent(pass_, " " * depth),
        num_steps=draw.choice([2, 3]),
        shared=shared,
        **nested,
    )
    return PROGRAM.format(
        make=make or "pass",
        num_towers=draw.choice([4, 6]),
        rows=rows,
        steps=indent(steps, "    "),
        prepare=nested["prepare"],
    )


def in_a_fresh_process(program):
    """Return a program that begins as a process does, with seeds of its own."""

    def run(job):
        torch.seed()
        random.seed()
        np.random.seed()
        return program(job)

    return run


@pytest.mark.parametrize("seed", seeds(400, 0))
def test_draws_on_which_the_weights_depend_are_told_of(seed, tmp_path):
    code = written(seed)
    program = in_a_fresh_process(imported(code, tmp_path / f"draws_{seed}.py").program)
    digests, told = set(), {}
    for num_workers in (1, 2, 3):
        found = ran(program, num_workers)
        digests |= found.values
        told[num_workers] = found.told
    depends = digests == {None} or len(digests) > 1  # or all workers have raised an error
    for num_workers in (2, 3):
        assert bool(told[num_workers]) == depends, f"{num_workers} workers\n{code}\n{told}"
    assert depends or not told[1], f"{code}\n{told}"
