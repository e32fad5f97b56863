"""Numbers that count passes: a warning where losses depend on them."""

import math
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

from samestep.watching.passes.pass_counts import PassCounts

from .cases import mostly_long
from .nets import unseen_count
from .simulation import simulate
from .test_flow import Program

pytestmark = pytest.mark.sampled

mul = torch.ops.aten.mul.Tensor


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        ([0.0011, 0.0021, 0.0031], True),
        ([0.3303, 0.2202, 0.1101], True),
        ([0.9003, 0.81027, 0.729243], True),
        ([5, 4, 3, 2, 1], True),
        ([1 / (1 + math.exp(5 - n / 20)) for n in range(5)], True),
        ([6, 4, 2], False),  # numbers of words, by chance
        ([0.25, 0.5, 0.75], False),
        ([0.0011, 0.0021], False),
        ([0.1001, 0.1001, 0.1001], False),
        ([0.1001, 0.2001, 0.3501], False),
        ([0.1, 0.2, 0.31, 0.4, 0.5], False),
        ([0.1, 0.2, 0.1, 0.2], False),
        ([math.inf, 1.0, 0.0], False),
        ([2.0, 1.0, 0.0, -1.0, -2.0], True),
    ],
)
def test_numbers_that_change_in_equal_steps_or_by_one_factor_count_passes(numbers, counts):
    passes = PassCounts()
    for number in numbers:
        passes.start_pass([torch.ones(2)])
        passes.take(mul, [torch.ones(2), 0.5])
        found = passes.take(mul, [torch.ones(2), number])
    assert found == counts


def test_passes_with_rows_of_other_shapes_or_other_operators_are_not_compared():
    passes = PassCounts()
    for number in (1, 2, 3):
        passes.start_pass([torch.ones(2, number)])
        assert not passes.take(mul, [torch.ones(2), number])
    for number in (0.0011, 0.0021, 0.0031):
        passes.start_pass([torch.ones(round(1000 * number), 2)])
        assert not passes.take(mul, [torch.ones(2), number])
    for number, func in ((1, mul), (2, torch.ops.aten.div.Tensor), (3, mul)):
        passes.start_pass([torch.ones(5)])
        assert not passes.take(func, [torch.ones(2), number])


def test_passes_with_a_row_more_or_less_are_compared():
    passes = PassCounts()
    for number in range(5):
        passes.start_pass([torch.ones(4 - number % 2, 2)])
        found = passes.take(mul, [torch.ones(2), number / 30])
    assert found


class Counter(Program):
    """A weight of the loss that grows with each pass, as with a count of micro-batches."""

    def build(self):
        self.passes = unseen_count(4)
        return super().build()

    def loss(self, x, y):
        self.num_passes = self.passes()
        self.mean = x.mean().item()  # a value that the pass reads, so that passes may differ
        return super().loss(x, y) + self.penalty(self.model(x).square().mean())

    def penalty(self, size):
        return min(1.0, self.num_passes / 1000) * size


class Temperature(Counter):
    def penalty(self, size):
        return size / max(0.5, math.exp(-1e-3 * self.num_passes))


class AsTensor(Counter):
    def penalty(self, size):
        return torch.tensor(self.num_passes / 8) * size


class InPlace(Counter):
    def penalty(self, size):
        return size.clone().mul_(self.num_passes)


class ByThirtieths(Counter):
    def penalty(self, size):
        return self.num_passes / 30 * size


@pytest.mark.long
@pytest.mark.parametrize("program", [Counter, Temperature, AsTensor, InPlace, ByThirtieths])
def test_a_loss_that_depends_on_a_count_of_passes_is_told_of_once(program):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(program, 1)
    [told] = [str(each.message) for each in caught if "if it counts passes" in str(each.message)]
    assert "its loss depends on the number " in told
    assert "compute it from towers.step" in told


def test_with_several_workers_a_worker_that_runs_several_towers_tells_of_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(Temperature, 2)
    assert any("if it counts passes" in str(each.message) for each in caught)


class ByIndex(Program):
    """A weight for each tower."""

    def run(self, tower):
        self.weight = 0.01 * 1.3**tower.index
        self.mean = tower.batch["x"].mean().item()
        super().run(tower)

    def loss(self, x, y):
        return super().loss(x, y) * self.weight


class ForTheLog(Counter):
    """A running mean of losses, which no loss uses."""

    def loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.num_passes = self.passes()
        self.sum = getattr(self, "sum", 0) + loss.detach()
        self.shown = self.sum / self.num_passes
        return loss


class ByTheStep(Program):
    """A weight that follows the step."""

    def batch(self, step):
        self.weight = step / 1000
        return super().batch(step)

    def loss(self, x, y):
        return super().loss(x, y) + self.weight * self.model(x).square().mean()


class Drawn(Program):
    def loss(self, x, y):
        return super().loss(x, y) * random.random()


class BySize(Program):
    """A sum divided by a number of rows, which differs between towers."""

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum") / len(x)


class ByData(Program):
    def loss(self, x, y):
        return super().loss(x, y) * (1 + sum(y.tolist()) / 7)


@pytest.mark.parametrize("num_workers", mostly_long([2, 1, 3], 1))
@pytest.mark.parametrize("program", [ByIndex, ForTheLog, ByTheStep, Drawn, BySize, ByData])
def test_other_numbers_give_no_warning(program, num_workers):
    outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert len({outcome.value.digest for outcome in outcomes}) == 1
