"""Totals that come with a count and are no sums over rows, or have the count of something else: a warning."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from samestep import LossSum

from .cases import mostly_long
from .nets import batch_of
from .test_flow import Program
from .test_row_losses import OfAStep, told_of

pytestmark = pytest.mark.sampled

# ---- means that are passed as sums ---------------------------------------------------------------------


class MeanAsSum(Program):
    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        tower.backward_sum(F.cross_entropy(self.model(x), y), len(y))


class MeanOverLabelsAsSum(Program):
    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        labels = torch.where(y != 2, y, -100)
        tower.backward_sum(F.cross_entropy(self.model(x), labels), (y != 2).sum() + 1)


class DividedTwice(Program):
    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        tower.backward_sum(F.cross_entropy(self.model(x), y, reduction="sum") / len(y), len(y))


class ReturnedMean(OfAStep):
    def loss_of(self, model, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        return LossSum(loss, torch.tensor(len(batch["y"])))


class NamedMean(OfAStep):
    counts: ClassVar = {"rows": lambda batch: len(batch["y"])}

    def loss_of(self, model, batch):
        return {"rows": F.cross_entropy(model(batch["x"]), batch["y"])}


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [MeanAsSum, MeanOverLabelsAsSum, DividedTwice, ReturnedMean, NamedMean])
def test_a_mean_that_is_passed_as_a_sum_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "is a mean, made in test_totals.py, line ")
    assert len(told) == num_workers
    assert all("pass the undivided sum" in each for each in told)


class OfMeansOfEachRow(Program):
    def run(self, tower):
        found = F.mse_loss(self.model(tower.batch["x"]), tower.batch["x"][:, :3], reduction="none")
        tower.backward_sum(found.mean(1).sum(), tower.rows)


class MeanOfATower(Program):
    """Each tower counts as one."""

    def run(self, tower):
        tower.backward_sum(F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"]), 1)


class HalfASum(Program):
    """Of two rows, as it happens."""

    def batch(self, step):
        return batch_of(step, 14)

    def run(self, tower):
        total = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"], reduction="sum")
        tower.backward_sum(0.5 * total, tower.rows)


class MeanTimesRows(Program):
    def run(self, tower):
        loss = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"])
        tower.backward_sum(loss * tower.rows, tower.rows)


class MeanTimesThree(Program):
    def batch(self, step):
        return batch_of(step, 21)

    def run(self, tower):
        loss = 3 * F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"])
        tower.backward_sum(loss, tower.rows)


class OfMeansOverAsManyAsRows(Program):
    """Three features, in towers of three rows."""

    def batch(self, step):
        return batch_of(step, 21)

    def run(self, tower):
        loss = F.mse_loss(self.model(tower.batch["x"]), tower.batch["x"][:, :3])
        tower.backward_sum(loss * tower.rows, tower.rows)


class NamedSum(OfAStep):
    counts: ClassVar = {"rows": lambda batch: len(batch["y"])}

    def loss_of(self, model, batch):
        return {"rows": F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program",
    [
        HalfASum,
        OfMeansOfEachRow,
        MeanOfATower,
        MeanTimesRows,
        MeanTimesThree,
        OfMeansOverAsManyAsRows,
        NamedSum,
    ],
)
def test_other_sums_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "is a mean, made in")


# ---- terms that do not grow with the rows --------------------------------------------------------------


class WithAPenalty(Program):
    """Of weights alone."""

    strength = 0.01

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        total = F.cross_entropy(self.model(x), y, reduction="sum")
        penalty = sum(each.square().sum() for each in self.model.parameters())
        tower.backward_sum(self.joined(total, penalty, tower.rows), tower.rows)

    def joined(self, total, penalty, count):
        return total + 0.01 * penalty


class ByASetting(WithAPenalty):
    def joined(self, total, penalty, count):
        return penalty.mul(self.strength) + total


class Stacked(WithAPenalty):
    def joined(self, total, penalty, count):
        return torch.stack([total, -penalty]).sum()


class ThenScaled(WithAPenalty):
    def joined(self, total, penalty, count):
        return (total + penalty) * 0.5


class WithAMean(Program):
    def run(self, tower):
        z, y = self.model(tower.batch["x"]), tower.batch["y"]
        total = F.cross_entropy(z, y, reduction="sum") + 0.1 * self.term(z, tower.rows)
        tower.backward_sum(total, tower.rows)

    def term(self, z, count):
        return F.mse_loss(z, torch.zeros_like(z))


class WithABalance(WithAMean):
    """Of shares, as between experts."""

    def term(self, z, count):
        return (z.softmax(1).mean(0) * (z > 0).float().mean(0)).sum() * 3


class WithARoot(WithAMean):
    def term(self, z, count):
        return z.square().mean().sqrt()


class WithASpread(WithAMean):
    def term(self, z, count):
        return (1 - z.std(0)).relu().sum()


class ReturnedWithAPenalty(OfAStep):
    def loss_of(self, model, batch):
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return LossSum(total + self.penalty(model), torch.tensor(len(batch["y"])))

    def penalty(self, model):
        return 0.1 * model[0].weight.abs().sum()


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
        WithAPenalty,
        ByASetting,
        Stacked,
        ThenScaled,
        WithAMean,
        WithABalance,
        WithARoot,
        WithASpread,
        ReturnedWithAPenalty,
    ],
)
def test_a_term_that_does_not_grow_with_the_rows_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "that does not grow with the number of rows")
    assert len(told) == num_workers
    assert all("has a term, added in test_totals.py, line " in each for each in told)
    assert all("multiply it by the count" in each for each in told)


class PenaltyTimesZero(WithAPenalty):
    """So that each parameter has a gradient."""

    def joined(self, total, penalty, count):
        return total + 0.0 * penalty


class PenaltyTimesCount(WithAPenalty):
    def joined(self, total, penalty, count):
        return total + 0.01 * count * penalty


class PenaltyTimesRows(WithAPenalty):
    def joined(self, total, penalty, count):
        return total + penalty * self.strength * count


class PenaltyTimesSetting(WithAPenalty):
    """The number of rows comes first, and the product is small."""

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        total = F.cross_entropy(self.model(x), y, reduction="sum")
        penalty = sum(each.square().sum() for each in self.model.parameters())
        tower.backward_sum(total + len(y) * self.strength * penalty, len(y))


class MeanTimesCount(WithAMean):
    def term(self, z, count):
        return F.mse_loss(z, torch.zeros_like(z)) * count


class BalanceTimesCount(WithABalance):
    def term(self, z, count):
        return count * super().term(z, count)


class OfTwoSums(WithAMean):
    def term(self, z, count):
        return z.square().sum() + (z @ torch.ones(3)).exp().dot(torch.ones(len(z)))


class OfPartsOfRows(WithAMean):
    """Means of each row, and a constant of each row."""

    def term(self, z, count):
        return (z.var(1) + self.model[0].weight.logsumexp((0, 1))).sum()


class OfAMeanInAll(Program):
    """One mean, of two."""

    def run(self, tower):
        z, y = self.model(tower.batch["x"]), tower.batch["y"]
        tower.backward_sum((F.cross_entropy(z, y) + 0.1 * z.square().mean()) * tower.rows, tower.rows)


class AsOneCount(WithAPenalty):
    """Of each tower."""

    def run(self, tower):
        loss = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"], reduction="sum")
        tower.backward_sum(loss + 0.1 * self.model[0].weight.square().sum(), 1)


class PenaltyInAMean(Program):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) + 0.1 * self.model[0].weight.square().sum()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program",
    [
        PenaltyTimesZero,
        PenaltyTimesCount,
        PenaltyTimesRows,
        PenaltyTimesSetting,
        MeanTimesCount,
        BalanceTimesCount,
        OfTwoSums,
        OfPartsOfRows,
        OfAMeanInAll,
        AsOneCount,
        PenaltyInAMean,
    ],
)
def test_terms_that_grow_with_the_rows_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "that does not grow with the number of rows")


# ---- counts of the whole batch ---------------------------------------------------------------------------


class OfTheBatch(Program):
    def batch(self, step):
        batch = super().batch(step)
        self.rows, self.labels = len(batch["y"]), int((batch["y"] != 2).sum())
        return batch

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        tower.backward_sum(F.cross_entropy(self.model(x), y, reduction="sum"), self.rows)


class MeanAndAllRows(OfTheBatch):
    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        tower.backward_sum(F.cross_entropy(self.model(x), y) * len(y), self.rows)


class AllElements(OfTheBatch):
    def run(self, tower):
        x = tower.batch["x"]
        tower.backward_sum(F.mse_loss(self.model(x), x[:, :3], reduction="sum"), 3 * self.rows)


class AllLabels(OfTheBatch):
    """Those other than 2, as if padded; more than a tower has features or labels."""

    num_towers = 6

    def batch(self, step):
        super().batch(step)
        batch = batch_of(step, 21 - step % 3)
        return {"x": batch["x"][:, :1], "y": batch["y"]}

    def run(self, tower):
        labels = torch.where(tower.batch["y"] != 2, tower.batch["y"], -100)
        outputs = self.model(tower.batch["x"].expand(-1, 6))
        tower.backward_sum(F.cross_entropy(outputs, labels, reduction="sum"), self.labels)


class ReturnedWithAllRows(OfAStep):
    def batch(self, step):
        batch = super().batch(step)
        self.rows = len(batch["y"])
        return batch

    def loss_of(self, model, batch):
        total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return LossSum(total, torch.tensor(self.rows))


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [OfTheBatch, MeanAndAllRows, AllElements, AllLabels, ReturnedWithAllRows])
def test_a_count_of_the_whole_batch_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "comes with the count ")
    assert len(told) == num_workers
    in_words = rf"the gradient is smaller by about {program.num_towers}, the number of towers"
    assert all(in_words in each for each in told)


class AsManyAsAllRows(OfTheBatch):
    """Features of a tower that are larger than zero; and, by a setting, of none."""

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        count = (x > 0).sum()
        total = F.cross_entropy(self.model(x), y, reduction="none").sum()
        tower.backward_sum(total, count - count + self.rows)


class OwnLabels(OfTheBatch):
    """As many in each tower."""

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        tower.backward_sum(losses[:2].sum(), 2)


class CountsOfFeatures(OfTheBatch):
    """As many in each tower, as it happens: two of each row, and one more."""

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        total = F.cross_entropy(self.model(x), y, reduction="none").sum()
        tower.backward_sum(total, 7 + 0 * (x > 0).sum())


class CountedTwice(OfTheBatch):
    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        tower.backward_sum(F.cross_entropy(self.model(x), y, reduction="sum"), 2 * len(y))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program", [AsManyAsAllRows, OwnLabels, CountsOfFeatures, CountedTwice, NamedSum, MeanTimesRows]
)
def test_counts_of_towers_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "comes with the count ")
