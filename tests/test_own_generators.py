"""Generators that a program keeps somewhere, and that passes draw from: told on 1, 2 and 3 workers."""

import random
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import Towers
from samestep.identity import is_compiled
from samestep.watching.model.own_generators import OwnGenerators, is_generator
from samestep.watching.program.reach import in_reach

from .simulation import values

pytestmark = pytest.mark.sampled

GLOBAL = np.random.default_rng(0)
BY_NAME = {"mixing": random.Random(0)}
NUM_TOWERS = 7


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + GLOBAL.random())


class Mixing:
    def __init__(self):
        self.generator = np.random.RandomState(0)

    def __call__(self, x):
        return x * self.generator.rand()


class Drawing:
    def __call__(self, x):
        return x * GLOBAL.random()


def draw(x):
    return x * GLOBAL.random()


def drawing():
    generator = random.Random(0)

    def draw_from_a_closure(x):
        return x * generator.random()

    return draw_from_a_closure


DRAWN = random.Random(0)
MIXING, DRAWING, CLOSURE = Mixing(), Drawing(), drawing()


def train(job, change, make=lambda: nn.Linear(4, 2)):
    torch.manual_seed(0)
    model = make()
    towers = Towers(model, NUM_TOWERS, job=job)
    for step in range(2):
        for tower in towers(torch.randn(14, 4, generator=torch.Generator().manual_seed(step))):
            tower.backward(model(change(tower.batch, tower)).square().mean())
        towers.average()
        torch.optim.SGD(model.parameters(), 0.1).step()
    return samestep.digest(model)


def in_the_loop(job):
    """A variable of the function that has the loop."""
    model, rng = nn.Linear(4, 2), np.random.default_rng(0)
    towers = Towers(model, NUM_TOWERS, job=job)
    for tower in towers(torch.ones(14, 4)):
        tower.backward(model(tower.batch * rng.random()).square().mean())
    towers.average()


def in_a_step(job):
    model, generators = nn.Linear(4, 2), SimpleNamespace(own=random.Random(0))

    def loss(model, batch):
        return model(batch * generators.own.random()).square().mean()

    towers = Towers(model, NUM_TOWERS, job=job)
    samestep.Step(towers, loss, torch.optim.SGD(model.parameters(), 0.1))(torch.ones(14, 4))


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 1, 2])
@pytest.mark.parametrize(
    ("program", "named"),
    [
        (in_the_loop, "rng"),
        (in_a_step, "own of generators"),
        (partial(train, change=lambda x, _: x * GLOBAL.random()), "GLOBAL"),
        (partial(train, change=lambda x, _: draw(x)), "GLOBAL"),
        (partial(train, change=lambda x, _: x * BY_NAME["mixing"].random()), "mixing of BY_NAME"),
        (partial(train, change=lambda x, _: MIXING(x)), "generator of MIXING"),
        (partial(train, change=lambda x, _: DRAWING(x)), "GLOBAL"),
        (partial(train, change=lambda x, _, of=CLOSURE: of(x)), "generator"),
        (partial(train, change=lambda x, _, of=(CLOSURE,): of[0](x)), "generator"),
        (partial(train, change=partial(lambda r, x, _: x * r.random(), random.Random(0))), "change"),
        (partial(train, change=lambda x, _: x, make=lambda: Noisy(4, 2)), "GLOBAL"),
        (partial(train, change=lambda x, tower: seeds_it_once(x, tower)), "DRAWN"),
        (partial(train, change=lambda x, tower: seeds_it_too_late(x, tower)), "DRAWN"),
    ],
)
def test_a_draw_is_told_once_on_each_worker(program, named, num_workers):
    with pytest.warns(
        UserWarning, match=rf"^a pass drew from {named}, a random generator of its own"
    ) as told:
        values(program, num_workers)
    assert len(told) == num_workers


def seeds_a_generator(x, tower):
    return x * np.random.default_rng(tower.index).random()


def seeds_it_for_each_tower(x, tower):
    DRAWN.seed(tower.index)
    return x * DRAWN.random()


def seeds_numpys(x, tower):
    MIXING.generator.seed(tower.index)
    return MIXING(x)


def sets_the_state(x, tower):
    GLOBAL.bit_generator.state = np.random.default_rng(tower.index).bit_generator.state
    return draw(x)


def seeds_it_once(x, tower):
    if tower.index == 0:
        DRAWN.seed(0)
    return x * DRAWN.random()


def seeds_it_too_late(x, tower):
    x = x * DRAWN.random()
    DRAWN.seed(tower.index)
    return x * DRAWN.random()


def draws_from_the_global_ones(x, tower):
    return x * random.random() * np.random.rand() * torch.rand(())


def draws_what_no_seed_decides(x, tower):
    random.SystemRandom().random()
    return x


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        *(seeds_a_generator, seeds_it_for_each_tower, seeds_numpys, sets_the_state),
        *(draws_from_the_global_ones, draws_what_no_seed_decides),
    ],
)
def test_other_draws_are_let_through(change):
    digests = {
        value for num_workers in (1, 2, 3) for value in values(partial(train, change=change), num_workers)
    }
    assert len(digests) == 1


class Hostile:
    """What may lie among a program's variables: it raises at whatever it is asked."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    __iter__ = __len__ = __bool__ = __eq__ = __hash__ = __getattribute__


LOADED = []


class Lazy:
    """A proxy that loads what it stands for as soon as it is asked for its class, or its attributes."""

    def load(self):
        LOADED.append(self)
        return {}

    __class__ = __dict__ = property(load)


def test_what_lies_around_is_not_disturbed():
    around = [Hostile(), Lazy(), {Hostile: 1}, type("Slots", (), {"__slots__": ()})(), *range(10**5)]
    loop = []
    loop.append(loop)
    rng = random.Random(0)
    before = rng.getstate()
    generators = OwnGenerators(nn.Linear(1, 1))
    generators.start_step(in_reach(is_generator))
    assert in_reach(is_compiled) == []
    assert LOADED == []
    generators.note()
    with warnings.catch_warnings():
        generators.compare()
        generators.check()
    assert rng.getstate() == before
    rng.random()
    generators.compare()
    with pytest.warns(UserWarning, match="a pass drew from rng,"):
        generators.check()
    generators.compare()
    generators.check()
    assert len(around) > 10**5
