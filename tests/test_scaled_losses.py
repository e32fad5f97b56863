"""Losses that are scaled by the number of workers or towers, as other loops need it: a warning."""

import re

import pytest
import torch
import torch.nn.functional as F

from .cases import mostly_long
from .test_flow import Program
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled

SCALED = "its loss was (divided|multiplied) by"


class Scaling(Program):
    def __init__(self, job):
        self.num_workers = job.world_size
        super().__init__(job)


class ByWorkers(Scaling):
    def loss(self, x, y):
        return super().loss(x, y) / self.num_workers


class ByWorkersInPlace(Scaling):
    def loss(self, x, y):
        loss = super().loss(x, y)
        loss /= self.num_workers
        return loss


class ByATensor(Scaling):
    def loss(self, x, y):
        return self.model(x).square().mean() / torch.tensor(self.num_workers)


class TermsByWorkers(Scaling):
    def loss(self, x, y):
        z = self.model(x)
        loss = F.cross_entropy(z, y) + z.square().mean() + z.abs().mean() + z.exp().mean() / 2
        return loss / self.num_workers


class SumByWorkers(Scaling):
    """A mean that the program computes itself."""

    def loss(self, x, y):
        total = F.cross_entropy(self.model(x), y, reduction="sum")
        return total / len(y) / self.num_workers


class TimesWorkers(Scaling):
    def loss(self, x, y):
        return super().loss(x, y) * self.num_workers


class ByTowers(Program):
    """As in a loop that accumulates gradients."""

    def loss(self, x, y):
        return super().loss(x, y) / self.num_towers


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 7], 2))
@pytest.mark.parametrize(
    "program", [TimesWorkers, ByWorkers, ByWorkersInPlace, ByATensor, TermsByWorkers, SumByWorkers]
)
def test_a_loss_scaled_by_the_number_of_workers_is_told_of_once_on_each(program, num_workers):
    how = "multiplied" if program is TimesWorkers else "divided"
    told, _ = warnings_of(program, num_workers)
    assert len(told) == num_workers
    assert all(
        f"its loss was {how} by {num_workers}, in test_scaled_losses.py, line " in each for each in told
    )
    assert all("the number of workers" in each for each in told)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_loss_divided_by_the_number_of_towers_is_told_of_once_on_each(num_workers):
    told, _ = warnings_of(ByTowers, num_workers)
    assert len(told) == num_workers
    assert all("its loss was divided by 7, in test_scaled_losses.py" in each for each in told)
    assert all("the number of towers" in each for each in told)


# ---- right: other uses of such numbers --------------------------------------------------------------


class WrittenOut(Program):
    """Half of a squared error, as textbooks have it."""

    def loss(self, x, y):
        return F.mse_loss(self.model(x), x[:, :3]) / 2


class OfTerms(Program):
    """The mean of as many terms as there are workers."""

    def loss(self, x, y):
        z = self.model(x)
        losses = [F.cross_entropy(z, y), z.square().mean()]
        return sum(losses) / len(losses)


class OfStackedTerms(OfTerms):
    def loss(self, x, y):
        losses = torch.stack([super().loss(x, y), self.model(x).square().mean()])
        return losses.sum() / len(losses)


class OfRows(Program):
    """A mean over a tower's rows, of which it has as many as there are workers or towers."""

    num_towers = 3

    def batch(self, step):
        batch = super().batch(step)
        return {name: rows[: 6 + 3 * step] for name, rows in batch.items()}

    def loss(self, x, y):
        return sum(F.cross_entropy(self.model(a[None]), b[None]) for a, b in zip(x, y, strict=True)) / len(x)


class OfDrawnTerms(Program):
    """A mean of other numbers of terms in other towers."""

    def run(self, tower):
        self.count = 1 + tower.index % 2
        super().run(tower)

    def loss(self, x, y):
        z = self.model(x)
        return (F.cross_entropy(z, y) + z.square().mean() + z.abs().mean()) / self.count


class OfLongSums(Program):
    """A sum of more terms than Python's stack has room for, and one that is added to itself many times."""

    def loss(self, x, y):
        mean = self.model(x).square().mean()
        total = sum((mean for _ in range(1100)), mean * 0)
        doubled = 2.0**-80 * mean
        for _ in range(80):
            doubled = doubled + doubled
        return (total + doubled) / 1102


class Weighted(Program):
    def loss(self, x, y):
        weight, share = 2.0, 0.5
        return weight * super().loss(x, y) if len(x) % 2 else share * super().loss(x, y)


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program", [WrittenOut, OfTerms, OfStackedTerms, OfRows, OfDrawnTerms, OfLongSums, Weighted]
)
def test_other_factors_are_not_told_of(program, num_workers):
    assert not [each for each in warnings_of(program, num_workers)[0] if re.search(SCALED, each)]
