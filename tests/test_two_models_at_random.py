"""Programs that train two models against each other: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

BUILDS = [
    "ours, theirs = samestep.Towers(first, {T}, job=job), samestep.Towers(second, {T}, job=job)",
    "ours = theirs = samestep.Towers(nn.ModuleList([first, second]), {T}, job=job)",
    "ours = samestep.Towers(first, {T}, job=job, also=second)\ntheirs = ours",
    "ours, theirs = samestep.Towers(first, {T}, job=job, also=second), samestep.Towers(second, {T}, job=job)",
    "ours, theirs = samestep.Towers(first, {T}, job=job), samestep.Towers(second, {U}, job=job, seed=1)",
]

NOISES = [
    *("torch.randn(len(x), 4)", "torch.randn(len(x), 4, generator=generator)", "x[:, :4]", "fixed[: len(x)]"),
    "torch.from_numpy(numpy.random.rand(len(x), 4)).float()",
]

FAKES = [
    *("first(noise).detach()", "first(noise)", "no_grad(first, noise)", "first(noise.requires_grad_())"),
    *("copy.deepcopy(first)(noise).detach()", "torch.cat([first(noise).detach(), *kept])[: len(x)]"),
]

SECOND_LOSSES = [
    "F.softplus(second(fake)).mean() + F.softplus(-second(x)).mean()",
    "F.relu(1 + second(fake)).mean() + F.relu(1 - second(x)).mean()",
    "second(fake).mean() - second(x).mean()",
    "second(fake).mean() - second(x).mean() + 0.1 * penalty(second, x)",
    "F.softplus(second(torch.cat([x, fake])) * signs_of(x, fake)).mean()",
    "F.mse_loss(second(x), teacher(x).detach())",
]

FIRST_LOSSES = [
    *("F.softplus(-second(first(noise))).mean()", "-second(first(noise)).mean()"),
    *("F.mse_loss(first(noise), x)", "-second(first(noise)).mean() + F.l1_loss(first(noise), x)"),
    "F.mse_loss(first(noise), averages(noise).detach()) - second(first(noise)).mean()",
]

EDITS = [
    *("pass", "pass", "pass", "second.requires_grad_(False)", "second.requires_grad_(True)", "first.eval()"),
    *(
        "first.train()",
        "kept.append(fake.detach())",
        "kept[:] = kept[-2:]",
        "averages = copy.deepcopy(first)",
    ),
    "with torch.no_grad():\n    for p in second.parameters():\n        p.clamp_(-0.1, 0.1)",
    "with torch.no_grad():\n    averages[0].weight.lerp_(first[0].weight, 0.1)",
    *("our_optimizer.zero_grad()", "their_optimizer.zero_grad()", "second.zero_grad()", "count += 1"),
    *("our_optimizer.step()", "their_optimizer.step()", "teacher.load_state_dict(second.state_dict())"),
    *("first[0].weight.data.mul_(0.99)", "generator.manual_seed(step)", "scores.append(loss.item())"),
    "if len(scores) > 3 and scores[-1] < scores[-2]:\n    their_optimizer.param_groups[0]['lr'] *= 0.5",
    *("if step % 2:\n    second[0].reset_parameters()", "fixed = torch.randn(24, 4)"),
]

"""What the program does, at any moment."""

PROGRAM = """import copy

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import samestep


def batch_of(step):
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(step))


def no_grad(module, noise):
    with torch.no_grad():
        return module(noise)


def penalty(module, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def signs_of(x, fake):
    return torch.cat([-torch.ones(len(x), 1), torch.ones(len(fake), 1)])


def program(job):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), {norm}, nn.Tanh(), nn.Linear(8, 6))
    second = nn.Sequential(nn.Linear(6, 8), {other}, nn.Tanh(), nn.Linear(8, 1))
    averages, teacher = copy.deepcopy(first), copy.deepcopy(second)
    generator, fixed = torch.Generator().manual_seed(0), torch.randn(24, 4)
{build}
    our_optimizer = torch.optim.{optimizer}(first.parameters(), lr=0.05)
    their_optimizer = torch.optim.{optimizer}(second.parameters(), lr=0.05)
    kept, scores, count = [], [], 0
    fake, loss = torch.zeros(24, 6), torch.zeros(())
    for step in range(3):
{begin}
        for tower in theirs(batch_of(2 * step)):
            x = tower.batch
            noise = {noise}
            fake = {fake}
            loss = {second_loss}
{of_second}
            tower.backward(loss)
{after_second}
        theirs.average()
{before_their_step}
        their_optimizer.step()
{between}
        for tower in ours(batch_of(2 * step + 1)):
            x = tower.batch
            noise = {noise}
            loss = {first_loss}
{of_first}
            tower.backward(loss)
        ours.average()
        our_optimizer.step()
{end}
    return samestep.digest(nn.ModuleList([first, second]))
"""

SPECTRAL_NORM = "nn.utils.parametrizations.spectral_norm"

MOMENTS = {"begin": 8, "of_second": 12, "after_second": 12, "before_their_step": 8, "between": 8}
MOMENTS |= {"of_first": 12, "end": 8}
"""The moments of a step, and how far their code is indented."""


def written(seed):
    """Return the code of a program that trains two models, with one or two edits."""
    draw = random.Random(seed)
    edits = {moment: ["pass"] for moment in MOMENTS}
    for _ in range(draw.choice([0, 1, 1, 2])):
        edits[draw.choice(list(MOMENTS))].append(draw.choice(EDITS))
    towers = draw.choice([4, 6])
    return PROGRAM.format(
        build=indent(draw.choice(BUILDS).format(T=towers, U=6), "    "),
        norm=draw.choice(["nn.LayerNorm(8)", "nn.BatchNorm1d(8)", "nn.Identity()"]),
        other=draw.choice(["nn.LayerNorm(8)", "nn.Dropout(0.1)", f"{SPECTRAL_NORM}(nn.Linear(8, 8))"]),
        optimizer=draw.choice(["SGD", "Adam"]),
        noise=draw.choice(NOISES),
        fake=draw.choice(FAKES),
        second_loss=draw.choice(SECOND_LOSSES),
        first_loss=draw.choice(FIRST_LOSSES),
        **{moment: indent("\n".join(edits[moment]), " " * MOMENTS[moment]) for moment in MOMENTS},
    )


@pytest.mark.parametrize("seed", seeds(200, 1))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"two_models_{seed}.py")
