"""What programs make, after average(), of their own towers alone, and use in the next step's losses: refused;
what is the same on all workers, and what a tower keeps for itself: one digest on 1, 2 and 3 workers."""

import copy
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Step, Towers
from samestep.errors import DisagreementError
from samestep.workers.collectives import gather_objects

from .cases import mostly_long
from .nets import batch_of, net
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 3], 1)
BY_SOURCE_CODE = pytest.mark.filterwarnings("ignore:computed from the passes of this worker alone")
"""Another check warns before the first step."""


class Program:
    """A loop that keeps things between two steps."""

    num_towers = 7
    steps = 3

    def __init__(self, job):
        self.job = job
        self.model = net()
        self.begin()
        towers = Towers(self.model, self.num_towers, job=job)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        for step in range(self.steps):
            self.kept = []
            batch = batch_of(step, self.num_rows(step))
            for self.tower in towers(batch):
                x, y = self.tower.batch["x"], self.tower.batch["y"]
                self.tower.backward(self.loss(self.model(x), x, y))
            self.report = towers.average()
            optimizer.step()
            self.go_on()
        self.digest = samestep.digest(self.model)

    def num_rows(self, step):
        return 21 - step % 3

    def begin(self):
        self.center = torch.zeros(3)

    def loss(self, z, x, y):
        self.kept.append(z.detach())
        return F.cross_entropy(z - self.center, y)

    def go_on(self):
        pass


class Center(Program):
    def go_on(self):
        self.center = 0.9 * self.center + 0.1 * torch.cat(self.kept).mean(0)


class CenterInPlace(Program):
    def go_on(self):
        self.center.lerp_(torch.cat(self.kept).mean(0), 0.1)


class Queue(Program):
    def begin(self):
        self.held = {"queue": torch.ones(32, 3), "at": 0}

    def loss(self, z, x, y):
        self.kept.append(z.detach())
        return torch.cat([z, z @ self.held["queue"].t()], 1).logsumexp(1).mean()

    def go_on(self):
        keys = torch.cat(self.kept)
        self.held["queue"] = torch.cat([keys, self.held["queue"]])[:32]


class Weight(Program):
    """A number, from the losses of this worker's towers."""

    def begin(self):
        self.weight = 1.0

    def loss(self, z, x, y):
        penalty = z.square().mean()
        self.kept.append(penalty.item())
        return F.cross_entropy(z, y) + self.weight * penalty

    def go_on(self):
        self.weight *= 1 + sum(self.kept) / len(self.kept)


class WeightOfNumPy(Weight):
    def go_on(self):
        self.weight *= 1 + np.mean(self.kept)


class Array(Program):
    """A center in NumPy, in whose memory a tensor lies."""

    def begin(self):
        self.array = np.zeros(3, dtype=np.float32)

    @property
    def center(self):
        return torch.from_numpy(self.array)

    def go_on(self):
        self.array = self.array + torch.cat(self.kept).mean(0).numpy()


class ArrayInPlace(Array):
    """The same, of which each pass makes a tensor with a copy, in another precision."""

    def begin(self):
        self.array = np.zeros(3)

    @property
    def center(self):
        return torch.tensor(self.array, dtype=torch.float32)

    def go_on(self):
        self.array += torch.cat(self.kept).mean(0).numpy()


class ListOfNumbers(Program):
    def begin(self):
        self.numbers = [0.0] * 3

    @property
    def center(self):
        return torch.tensor(self.numbers)

    def go_on(self):
        self.numbers = torch.cat(self.kept).mean(0).tolist()


class UpdatedInEachPass(Weight):
    """A number that a pass uses before it replaces it."""

    def loss(self, z, x, y):
        loss = F.cross_entropy(z, y) * self.weight
        self.weight = 0.3 * loss.item()
        return loss

    def go_on(self):
        pass


class Target(Program):
    """A net that each worker draws from a seed of its own."""

    def begin(self):
        torch.manual_seed(self.job.rank)
        self.target = nn.Sequential(nn.Linear(6, 3), nn.Tanh()).requires_grad_(False)

    def loss(self, z, x, y):
        return F.mse_loss(z, self.target(x))


class InAFunction(Program):
    """As the loss function of a `Step`, which finds the mean in its closure."""

    def __init__(self, job):
        model, center, kept = net(), torch.zeros(3), []

        def loss(model, batch):
            z = model(batch["x"])
            kept.append(z.detach())
            return F.cross_entropy(z - center, batch["y"])

        step = Step(Towers(model, 7, job=job), loss, torch.optim.SGD(model.parameters(), 0.1))
        for index in range(3):
            step(batch_of(index))
            center.lerp_(torch.cat(kept).mean(0), 0.1)
            kept.clear()


@pytest.mark.sampled(50)
@BY_SOURCE_CODE
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Center, "center of self"),
        (CenterInPlace, "center of self"),
        (Queue, "queue of held of self"),
        (Weight, "weight of self"),
        (WeightOfNumPy, "weight of self"),
        (Array, "array of self"),
        (ArrayInPlace, "array of self"),
        (ListOfNumbers, "numbers[0] of self"),
        (Target, "target of self.0.weight"),
        (InAFunction, "center"),
    ],
)
def test_what_workers_make_of_their_own_towers_is_refused(program, name, num_workers):
    step = 0 if program is Target else 1
    for outcome in simulate(program, num_workers, num_workers):
        assert isinstance(outcome.error, DisagreementError), outcome
        assert outcome.text.partition(": ")[2].startswith(
            f"step {step}: losses depend on {name}, which is not part of the model, and differs between "
            "workers 0 and 1"
        )
        assert "buffers={pattern: policy}" in outcome.text
    assert simulate(program, 1)[0].error is None


@pytest.mark.long
@BY_SOURCE_CODE
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Center, "center of self"),
        (Queue, "queue of held of self"),
        (Weight, "weight of self"),
        (WeightOfNumPy, "weight of self"),
        (Array, "array of self"),
        (InAFunction, "center"),
    ],
)
def test_with_one_tower_per_worker_it_is_a_warning(program, name):
    with pytest.warns(UserWarning, match=f"step 1: losses depend on {name}, which is not part") as caught:
        assert all(outcome.error is None for outcome in simulate(program, 7))
    told = [str(each.message) for each in caught if "computed from the passes" not in str(each.message)]
    assert len(told) == 7
    assert "keep what is of one tower in a dict, by tower.index" in told[0]


@pytest.mark.long
def test_what_its_pass_left_in_the_step_before_is_told_of_too():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all(outcome.error is None for outcome in simulate(UpdatedInEachPass, 7))
    told = [str(each.message).partition("depend")[2] for each in caught]
    assert sum("on weight of self, which is not part" in each for each in told) == 7
    assert sum("on weight of self, which each pass computes from" in each for each in told) == 7


# ---- what is the same on all workers, or of one tower ------------------------------------------------


class OfTheReport(Weight):
    def loss(self, z, x, y):
        return F.cross_entropy(z, y) + self.weight * z.square().mean()

    def go_on(self):
        self.weight *= 1 + self.report.loss


class Gathered(Center):
    def go_on(self):
        self.kept = [z for kept in gather_objects(self.job.transport, self.kept, "outputs") for z in kept]
        super().go_on()


class OfTheBatch(Center):
    def go_on(self):
        with torch.no_grad():
            self.kept = [self.model(batch_of(7)["x"])]
        super().go_on()


class Logged(Center):
    """Means that go into no loss, and what passes leave in variables."""

    def begin(self):
        super().begin()
        self.logged = torch.zeros(3)

    def loss(self, z, x, y):
        self.logged = self.logged + z.detach().mean(0)
        self.last, self.number = z.detach(), z.mean().item()
        self.kept.append(self.last)
        assert torch.isfinite(z + self.center).all()
        return F.cross_entropy(z, y)


class OfEachTower(Program):
    """In a tensor for each, and in one for all, of which a pass reads its own part."""

    def begin(self):
        self.states = {tower: torch.zeros(3) for tower in range(self.num_towers)}
        self.parts = torch.zeros(self.num_towers, 3)

    def loss(self, z, x, y):
        own = self.tower.index
        state = self.states[own] + self.parts[own]
        self.states[own], self.parts[own] = (z.detach().mean(0) for _ in range(2))
        return F.cross_entropy(z - state, y)


class OneOfTwoTeachers(Program):
    def begin(self):
        self.teachers = [nn.Linear(6, 3) for _ in range(2)]
        for seed, teacher in enumerate(self.teachers):
            nn.init.normal_(teacher.weight, seed, generator=torch.Generator().manual_seed(seed))
            nn.init.zeros_(teacher.bias)

    def loss(self, z, x, y):
        with torch.no_grad():
            target = self.teachers[random.randrange(2)](x)
        return F.mse_loss(z, target)


class RowsByNumber(Program):
    """Each worker has other data, of which its towers look up their own rows."""

    def begin(self):
        self.data = torch.cat([batch_of(9)["x"], torch.full((3, 6), self.job.rank)])

    def loss(self, z, x, y):
        rows = torch.arange(3 * self.tower.index, 3 * self.tower.index + len(x))
        return F.cross_entropy(self.model(self.data[rows]), y)


class StepSize(Program):
    """A number that each pass finds by itself, and that the last one leaves."""

    def begin(self):
        self.size = 0.1

    def loss(self, z, x, y):
        self.size = 0.1
        while (self.size * z).abs().max() > 0.05:
            self.size /= 2
        return F.cross_entropy(self.size * z, y)


class ShareOfRows(Program):
    """A number that each pass computes of its size, and that the last one leaves."""

    num_towers = 8

    def loss(self, z, x, y):
        self.share = len(x) / 42
        return self.share * F.cross_entropy(z, y)


class RootOfRows(ShareOfRows):
    """The same, of a number that is no fraction."""

    def loss(self, z, x, y):
        self.share = 1 / math.sqrt(len(x))
        return self.share * F.cross_entropy(z, y)


class MaskOfASize(Program):
    """Kept until a tower has another number of rows, as masks and labels by position are."""

    def begin(self):
        self.mask = torch.empty(0)

    def loss(self, z, x, y):
        if len(self.mask) != len(x):
            self.mask = torch.arange(len(x)) + 0.3
        return (F.cross_entropy(z, y, reduction="none") * self.mask).mean()


class NumberOfASize(Program):
    """As `MaskOfASize`, but a number, of which there is one for each size."""

    def begin(self):
        self.size, self.root = 0, 0.0

    def loss(self, z, x, y):
        if self.size != len(x):
            self.size, self.root = len(x), len(x) ** 0.5
        return F.cross_entropy(z, y) * self.root


class StateInALoop:
    """Of each tower, by its index, of which the last one has another name, too."""

    def __init__(self, job):
        model, states = net(), {}
        towers = Towers(model, 7, job=job)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            for tower in towers(batch_of(step, 21 - step % 3)):
                state = states.get(tower.index, torch.zeros(3))
                z = model(tower.batch["x"]) - state
                state = states[tower.index] = z.detach().mean(0)
                tower.backward(F.cross_entropy(z, tower.batch["y"]))
            towers.average()
            optimizer.step()
        self.digest = samestep.digest(model)


class OwnRows:
    """A worker has the rows of its own towers only, in variables."""

    def __init__(self, job):
        model = net()
        towers = Towers(model, 7, job=job)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            whole = batch_of(step, 21)
            slices = {
                t: {k: v[3 * t : 3 * t + 3].clone() for k, v in whole.items()}
                for t in towers.placement.towers(job.rank)
            }
            del whole
            first, rows = min(slices), slices[min(slices)]["x"]
            for tower in towers(samestep.LocalBatch(21, slices, position=step)):
                x = rows if tower.index == first else tower.batch["x"]
                tower.backward(F.cross_entropy(model(x), tower.batch["y"]))
            towers.average()
            optimizer.step()
        self.digest = samestep.digest(model)


class WeightsInNumPy(Program):
    """The same on all workers, and rows that towers look up."""

    def begin(self):
        self.weights = np.array([0.31, 0.52, 0.77])
        self.order = np.random.default_rng(self.job.rank).permutation(40)
        self.data = torch.arange(40.0) + self.job.rank

    def loss(self, z, x, y):
        rows = torch.from_numpy(self.order)[: len(x)]
        assert len(self.data[rows]) == len(x)
        return (F.cross_entropy(z, y, reduction="none") * torch.tensor(self.weights).float()[y]).mean()


class Teacher(Program):
    def begin(self):
        self.teacher = copy.deepcopy(self.model)

    def loss(self, z, x, y):
        return F.cross_entropy(z, y) + F.mse_loss(z, self.teacher(x).detach())

    def go_on(self):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                p.lerp_(q, 0.1)


@pytest.mark.parametrize("num_workers", mostly_long([3, 7, 2], 1))
@pytest.mark.parametrize(
    "program",
    [
        OfTheReport,
        Gathered,
        OfTheBatch,
        Logged,
        OfEachTower,
        OneOfTwoTeachers,
        RowsByNumber,
        StepSize,
        ShareOfRows,
        RootOfRows,
        MaskOfASize,
        NumberOfASize,
        StateInALoop,
        OwnRows,
        WeightsInNumPy,
        Teacher,
    ],
)
def test_what_is_the_same_on_all_workers_is_let_through(program, num_workers):
    digests = {p.digest for num in (1, num_workers) for p in values(program, num, num)}
    assert len(digests) == 1


@pytest.mark.long
@BY_SOURCE_CODE
def test_what_differs_later_is_found_in_a_later_step_that_is_followed():
    class Late(Center):
        steps = 34

        def loss(self, z, x, y):
            self.kept.append(z.detach())
            return F.cross_entropy(z - self.center if self.steps_taken > 9 else z, y)

        @property
        def steps_taken(self):
            return getattr(self, "taken", 0)

        def go_on(self):
            super().go_on()
            self.taken = self.steps_taken + 1

    for outcome in simulate(Late, 2):
        assert "step 32: losses depend on center of self" in outcome.text


@pytest.mark.long
def test_nothing_is_sent_where_losses_of_equal_towers_depend_on_the_model_alone():
    class Alone(Program):
        def num_rows(self, step):
            return 21

        def loss(self, z, x, y):
            return F.cross_entropy(z, y)

        def go_on(self):
            assert not any("comparison" in what for _, _, what, _ in self.job.transport.world.events)

    values(Alone, 3)


@pytest.mark.long
def test_a_step_that_was_refused_can_be_taken_again():
    def program(job):
        model, center, refused = net(), torch.zeros(3), []
        towers = Towers(model, 5, job=job)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def take(step):
            for tower in towers(batch_of(step)):
                tower.backward(F.cross_entropy(model(tower.batch["x"]) - center, tower.batch["y"]))
            towers.average()
            optimizer.step()

        for step in range(3):
            try:
                take(step)
            except DisagreementError:
                refused.append(step)
                assert all(p.grad is None for p in model.parameters())
                center.zero_()
                take(step)
            center.fill_(job.rank if step == 0 else 0)
        return refused, samestep.digest(model)

    alone, several = values(program, 1)[0], values(program, 3)
    assert [refused for refused, _ in several] == [[1]] * 3
    assert {digest for _, digest in several} == {alone[1]}
