"""Rows or numbers that passes take from an iterator of their own, such as a second data loader."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import samestep

from .cases import mostly_long
from .test_flow import Program
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 2)
OTHERS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


def unlabeled():
    return DataLoader(OTHERS, batch_size=4)


class Cycled(Program):
    """Each pass takes the next rows of an endless loader, as in semi-supervised training."""

    def build(self):
        self.others = itertools.cycle(unlabeled())
        return super().build()

    def loss(self, x, y):
        return super().loss(x, y) + 0.1 * self.model(self.taken()).square().mean()

    def taken(self):
        return next(self.others)


class FromAGenerator(Cycled):
    def build(self):
        self.others = self.endless()
        return Program.build(self)

    def endless(self):
        while True:
            yield from unlabeled()


class StartedAgain(Cycled):
    def build(self):
        self.others = iter(unlabeled())
        return Program.build(self)

    def taken(self):
        try:
            return next(self.others)
        except StopIteration:
            self.others = iter(unlabeled())
            return next(self.others)


class ByALoop(Cycled):
    def taken(self):
        for rows in self.others:
            found = rows
            break
        return found


class Sliced(Cycled):
    def taken(self):
        return torch.cat(list(itertools.islice(self.others, 1)))


class Popped(Cycled):
    def build(self):
        self.others = [*unlabeled()] * 2
        return Program.build(self)

    def taken(self):
        return self.others.pop()


class Sent(Program):
    """A generator that keeps a running mean."""

    def build(self):
        self.means = self.running()
        next(self.means)
        return super().build()

    def running(self):
        mean = 0.0
        while True:
            mean = 0.9 * mean + (yield mean)

    def loss(self, x, y):
        loss = super().loss(x, y)
        return loss / (1 + self.means.send(loss.item()))


class Counted(Program):
    def build(self):
        self.passes = itertools.count(1)
        return super().build()

    def loss(self, x, y):
        return super().loss(x, y) / next(self.passes)


class Zipped(Cycled):
    def __init__(self, job):
        self.model = self.build()
        towers = samestep.Towers(self.model, self.num_towers, job=job)
        for step in range(self.steps):
            for tower, rows in zip(towers(self.batch(step)), self.others):  # noqa: B905 - it has no end
                tower.backward(self.loss(tower.batch["x"], tower.batch["y"], rows))
            towers.average()
        self.digest = None  # nothing is updated

    def loss(self, x, y, rows):
        return F.cross_entropy(self.model(x), y) + 0.1 * self.model(rows).square().mean()


class Numbered(Zipped):
    """Rows by a count of the towers of this worker."""

    def __init__(self, job):
        self.model = self.build()
        towers, others = samestep.Towers(self.model, self.num_towers, job=job), [*unlabeled()]
        for step in range(self.steps):
            for number, tower in enumerate(towers(self.batch(step))):
                tower.backward(self.loss(tower.batch["x"], tower.batch["y"], others[number]))
            towers.average()
        self.digest = None


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        *[
            (each, "others of self")
            for each in (Cycled, FromAGenerator, StartedAgain, ByALoop, Sliced, Popped)
        ],
        (Sent, "means of self"),
        (Counted, "passes of self"),
        (Zipped, "rows"),
        (Numbered, "number"),
    ],
)
def test_what_passes_take_from_an_iterator_is_named(program, name, num_workers):
    told, _ = warnings_of(program, num_workers)
    assert len(told) == num_workers
    assert all(f"its loss depends on {name}, which each pass computes from" in each for each in told)


class OncePerStep(Cycled):
    """Rows of an iterator that are a part of the batch."""

    def batch(self, step):
        batch = super().batch(step)
        return {**batch, "other": torch.cat([next(self.others) for _ in range(6)])[: len(batch["x"])]}

    def run(self, tower):
        loss = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"])
        tower.backward(loss + 0.1 * self.model(tower.batch["other"]).square().mean())


class FromTheBeginning(Cycled):
    """Each pass takes the same rows."""

    def taken(self):
        return next(iter(unlabeled()))


class OfThePass(Cycled):
    """A generator that each pass makes."""

    def taken(self):
        return torch.stack([*self.drawn()])

    def drawn(self):
        for _ in range(2):
            yield torch.randn(6)


class NumberedForTheLog(Program):
    def __init__(self, job):
        self.model = self.build()
        towers = samestep.Towers(self.model, self.num_towers, job=job)
        for step in range(self.steps):
            losses = []
            for number, tower in enumerate(towers(self.batch(step))):
                loss = self.loss(tower.batch["x"], tower.batch["y"])
                if number % 2 == 0:
                    losses.append(loss.item())
                tower.backward(loss)
            towers.average()
        self.digest = samestep.digest(self.model)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [OncePerStep, FromTheBeginning, OfThePass, NumberedForTheLog])
def test_what_every_tower_gets_alike_gives_no_warning(program, num_workers):
    told, digests = warnings_of(program, num_workers)
    assert told == []
    assert len(digests) == 1
