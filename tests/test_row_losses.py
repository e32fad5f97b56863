"""Losses that are sums over a tower's rows: a warning."""

import re
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from samestep import LossSum, Step, Towers

from .cases import mostly_long
from .nets import batch_of
from .test_flow import Program
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled

SUMMED = "its loss is a sum over rows, made in test_row_losses.py, line "


def told_of(program, num_workers, what=SUMMED):
    return [each for each in warnings_of(program, num_workers)[0] if what in each]


class ByReduction(Program):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum")


class ByTerms(Program):
    def loss(self, x, y):
        return F.mse_loss(self.model(x), x[:, :3], reduction="none").sum()


class OfHalves(Program):
    def loss(self, x, y):
        return 0.5 * torch.sum((self.model(x) - x[:, :3]) ** 2)


class OfTwoSums(Program):
    """As in a variational autoencoder."""

    def loss(self, x, y):
        mean, log_variance = self.model(x)[:, :1], self.model(x)[:, 1:]
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = F.binary_cross_entropy(sample.sigmoid(), x[:, :2].sigmoid(), reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return error + 3 * divergence


class OfStackedSums(Program):
    def loss(self, x, y):
        z = self.model(x)
        return torch.stack([F.cross_entropy(z, y, reduction="sum"), z.square().sum()]).sum()


class OfLikelihoods(Program):
    """Divided by a number of samples."""

    def loss(self, x, y):
        return -Normal(self.model(x), 1.5).log_prob(x[:, :3]).sum() / 1


class OfTokens(Program):
    def build(self):
        torch.manual_seed(0)
        return nn.Linear(1, 5)

    def loss(self, x, y):
        logits = self.model(x[:, :, None])
        labels = (x > 0).long()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Weighted(Program):
    def loss(self, x, y):
        return (F.cross_entropy(self.model(x), y, reduction="none") * x[:, 0].abs()).sum()


class MeanTimesRows(Program):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) * len(x)


class MeanTimesElements(Program):
    def loss(self, x, y):
        z = self.model(x)
        return z.numel() * F.mse_loss(z, x[:, :3])


class ByADotProduct(Program):
    def loss(self, x, y):
        error = (self.model(x) - x[:, :3]).flatten()
        return torch.dot(error, error)


class ByASqueezedProduct(Program):
    def loss(self, x, y):
        error = self.model(x)[:, :1] - x[:, :1]
        return (error.T @ error).squeeze()


class ByALoop(Program):
    def loss(self, x, y):
        total = 0
        for row, label in zip(x, y, strict=True):
            total = total + F.cross_entropy(self.model(row[None]), label[None])
        return total


class ByIndex(Program):
    def loss(self, x, y):
        return 0.5 * sum((self.model(x[at : at + 1]) - x[at, :3]).square().mean() for at in range(len(x)))


class OfAStep(Program):
    counts: ClassVar = None

    def __init__(self, job):
        torch.manual_seed(0)
        self.model = self.build()
        towers = Towers(self.model, self.num_towers, job=job)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        step = Step(towers, self.loss_of, optimizer, counts=self.counts)
        step(self.batch(0))
        self.digest = ""

    def loss_of(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program",
    [
        ByReduction,
        ByTerms,
        OfHalves,
        OfTwoSums,
        OfStackedSums,
        OfLikelihoods,
        OfTokens,
        Weighted,
        MeanTimesRows,
        MeanTimesElements,
        ByADotProduct,
        ByASqueezedProduct,
        ByALoop,
        ByIndex,
        OfAStep,
    ],
)
def test_a_sum_that_is_passed_as_a_mean_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers)
    assert len(told) == num_workers
    assert all("call tower.backward_sum(total, tower.rows)" in each for each in told)


class BesideAMean(Program):
    """A variational autoencoder's error and divergence, of which only the error is a mean."""

    def loss(self, x, y):
        mean, log_variance = self.model(x)[:, :1], self.model(x)[:, 1:]
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.mse_loss(mean, x[:, :1]) + self.weighed(divergence)

    def weighed(self, divergence):
        return divergence


class BesideAMeanByANumber(BesideAMean):
    def weighed(self, divergence):
        return 0.001 * divergence


class BesideAMeanByASetting(BesideAMean):
    weight = 0.00025

    def weighed(self, divergence):
        return self.weight * divergence


class BesideAMeanOfLabels(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + 0.1 * z.square().sum()


class BesideAMeanHalved(BesideAMean):
    def weighed(self, divergence):
        return divergence / 2


class BesideAMeanTimesRows(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + len(x) * z.square().mean()


class BesideAMeanOfAllTimesRows(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + z.square().sum() / z.numel() * len(x)


class BesideAMeanByAVariable(Program):
    def loss(self, x, y):
        z, rows = self.model(x), len(x)
        mean = F.mse_loss(z, x[:, :3])
        loss = mean * rows
        return loss + F.cross_entropy(z, y)


class StackedBesideAMean(Program):
    def loss(self, x, y):
        z = self.model(x)
        return torch.stack([z.square().sum(), F.cross_entropy(z, y)]).mean()


class BesideAMeanAndScaled(BesideAMean):
    """Both together, by a setting."""

    num_layers = 12

    def loss(self, x, y):
        return super().loss(x, y) / self.num_layers


class BesideAMeanByAFraction(BesideAMean):
    sigma = 0.2

    def weighed(self, divergence):
        return divergence / self.sigma


class BesideAMeanByALoop(ByALoop):
    def loss(self, x, y):
        return super().loss(x, y) + F.mse_loss(self.model(x), x[:, :3])


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
        BesideAMean,
        BesideAMeanOfLabels,
        BesideAMeanByANumber,
        BesideAMeanByASetting,
        BesideAMeanHalved,
        BesideAMeanTimesRows,
        BesideAMeanOfAllTimesRows,
        BesideAMeanByAVariable,
        StackedBesideAMean,
        BesideAMeanAndScaled,
        BesideAMeanByAFraction,
    ],
)
def test_a_sum_beside_a_mean_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "its loss has a sum over rows, made in test_row_losses.py, line ")
    assert len(told) == num_workers
    assert all("divide the sum by tower.rows" in each for each in told)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
def test_a_sum_of_single_rows_beside_a_mean_is_told_of(num_workers):
    told = told_of(BesideAMeanByALoop, num_workers)
    assert len(told) == num_workers


class BesideAMeanDivided(BesideAMean):
    def weighed(self, divergence):
        return 0.1 * divergence / len(self.model(self.x))

    def loss(self, x, y):
        self.x = x
        return super().loss(x, y)


class BesideAMeanByAShare(BesideAMeanDivided):
    """By a weight and a count in one."""

    def weighed(self, divergence):
        weight, rows = 0.01, len(self.x)
        return (weight / rows) * divergence


class BesideAMeanAtFirst(BesideAMean):
    """By a weight that begins at zero."""

    def weighed(self, divergence):
        return 0 * divergence


# ---- sums that are divided by a number of the whole batch ---------------------------------------------


class OfTheBatch(Program):
    """Keeps the number of rows, or of labels other than 2, of the whole batch."""

    def batch(self, step):
        batch = super().batch(step)
        self.rows, self.labels = len(batch["y"]), int((batch["y"] != 2).sum())
        return batch


class DividedByAllRows(OfTheBatch):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum") / self.rows


class DividedByAllElements(OfTheBatch):
    def loss(self, x, y):
        return F.mse_loss(self.model(x), x[:, :3], reduction="sum") / (3 * self.rows)


class DividedByAllLabels(OfTheBatch):
    def loss(self, x, y):
        labels = torch.where(y != 2, y, -100)
        return F.cross_entropy(self.model(x), labels, reduction="sum") / self.labels


class MaskedAndDivided(OfTheBatch):
    def loss(self, x, y):
        return ((y != 2) * F.cross_entropy(self.model(x), y, reduction="none")).sum() / self.labels


class DividedByWrittenRows(Program):
    """In the code."""

    def batch(self, step):
        return batch_of(step, 21)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="sum") / 21


class TimesItsShare(OfTheBatch):
    """A mean, as a loop that accumulates gradients weighs it."""

    def loss(self, x, y):
        share = len(y) / self.rows
        return F.cross_entropy(self.model(x), y) * share


class WithATerm(OfTheBatch):
    def loss(self, x, y):
        z = self.model(x)
        return (F.cross_entropy(z, y, reduction="sum") + 0.1 * z.square().sum()) / self.rows


PART = "divided by a number of the whole batch, the gradient is smaller by about "


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
        DividedByWrittenRows,
        DividedByAllRows,
        DividedByAllElements,
        DividedByAllLabels,
        MaskedAndDivided,
        TimesItsShare,
        WithATerm,
    ],
)
def test_a_part_of_a_mean_over_the_batch_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, PART)
    assert len(told) == num_workers
    in_words = r" divided by (2\d, the rows|6\d, the elements) of the whole batch|13, the same in all"
    assert all(re.search(in_words, each) for each in told)


class WeighedByASetting(Program):
    """By one over the number of towers, as it happens."""

    num_towers = 5
    weight = 0.2

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) + self.weight * self.model(x).square().mean()


class WeighedInTheCode(Program):
    num_towers = 5

    def loss(self, x, y):
        return 0.2 * F.cross_entropy(self.model(x), y)


class AllWeighedByASetting(Program):
    """In towers of four rows, as if it were divided by ten."""

    num_towers = 6
    weight = 0.4

    def batch(self, step):
        return batch_of(step, 24)

    def loss(self, x, y):
        return self.weight * F.cross_entropy(self.model(x), y)


class OfWeighedTerms(AllWeighedByASetting):
    def loss(self, x, y):
        return (self.weight * F.cross_entropy(self.model(x), y, reduction="none")).sum() / len(x)


class PerPixel(Program):
    """A sum over the rows and a few features, divided by the number of other ones."""

    def loss(self, x, y):
        return self.model(x).square().sum() / x.numel()


class PartPassedAsSum(OfTheBatch):
    def run(self, tower):
        total = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"], reduction="sum")
        tower.backward_sum(total / self.rows, tower.rows / self.rows)


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
        WeighedByASetting,
        WeighedInTheCode,
        AllWeighedByASetting,
        OfWeighedTerms,
        PerPixel,
        PartPassedAsSum,
    ],
)
def test_other_parts_are_not(program, num_workers):
    assert not told_of(program, num_workers, PART)


# ---- right: means, and sums that are passed as such ---------------------------------------------------


class PassedAsSum(Program):
    def run(self, tower):
        total = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"], reduction="sum")
        tower.backward_sum(total, tower.rows)


class ReturnedAsSum(OfAStep):
    def loss_of(self, model, batch):
        return LossSum(super().loss_of(model, batch), len(batch["y"]))


class Divided(ByReduction):
    def loss(self, x, y):
        return super().loss(x, y) / len(y)


class DividedInPlace(ByReduction):
    def loss(self, x, y):
        loss = super().loss(x, y)
        loss /= len(y)
        return loss


class Multiplied(ByReduction):
    def loss(self, x, y):
        return 1 / len(y) * super().loss(x, y)


class OfDividedTerms(Program):
    def loss(self, x, y):
        return (F.cross_entropy(self.model(x), y, reduction="none") / len(y)).sum()


class OfTermsByATensor(Program):
    def loss(self, x, y):
        return (F.cross_entropy(self.model(x), y, reduction="none") / torch.full((len(y),), len(y))).sum()


class ByShares(Program):
    def loss(self, x, y):
        return (F.cross_entropy(self.model(x), y, reduction="none") * x[:, 0].softmax(0)).sum()


class ByLearnedShares(Program):
    def loss(self, x, y):
        z = self.model(x)
        return (F.cross_entropy(z, y, reduction="none") * z[:, 0].softmax(0)).sum()


class OfRowsOfSums(Program):
    def loss(self, x, y):
        return (self.model(x) - x[:, :3]).square().sum(1).mean()


class WithAPenalty(Program):
    """On weights of which there are as many as rows."""

    def loss(self, x, y):
        return super().loss(x, y) + 0.1 * sum(each.square().sum() for each in self.model.parameters())


class OfCorrelations(Program):
    """A sum over features, of which there are as many as rows."""

    num_towers = 7

    def batch(self, step):
        return batch_of(step, 21)

    def loss(self, x, y):
        z = self.model(x)
        correlations = z.T @ z / len(z)
        return (correlations.diagonal() - 1).square().sum() + correlations.sum()


class Masked(Program):
    """By the number of labels that a mask leaves."""

    def loss(self, x, y):
        mask = y == y[0]
        return (F.cross_entropy(self.model(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


class Scaled(Program):
    """As with small numbers, by a setting that is larger than any count."""

    scale = 1024.0

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) * self.scale


class ByALoopDivided(ByALoop):
    def loss(self, x, y):
        return super().loss(x, y) / len(y)


class ByALoopOfParts(Program):
    """Divided in each turn."""

    def loss(self, x, y):
        total = 0
        for row, label in zip(x, y, strict=True):
            total += F.cross_entropy(100 * self.model(row[None]), label[None]) / len(x)
        return total


class Distilled(Program):
    """From soft labels at another temperature, whose square is larger than the number of rows."""

    temperature, share = 4.0, 0.7

    def loss(self, x, y):
        z = self.model(x)
        divergence = F.kl_div(
            (z / self.temperature).log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"
        )
        return self.weighed(divergence * self.temperature**2, F.cross_entropy(z, y))

    def weighed(self, divergence, loss):
        return self.share * divergence + (1 - self.share) * loss


class DistilledAlone(Distilled):
    def weighed(self, divergence, loss):
        return divergence


class DistilledInPlace(Distilled):
    def weighed(self, divergence, loss):
        divergence *= 9
        loss += divergence
        return loss


class HeavyAndDivided(Program):
    def loss(self, x, y):
        z = self.model(x)
        return 90 * z.square().sum() / z.numel() + F.cross_entropy(z, y)


class HeavyByAShare(Program):
    def loss(self, x, y):
        z = self.model(x)
        return 90 / len(x) * z.square().sum() + F.cross_entropy(z, y)


class HeavyOfDividedTerms(OfDividedTerms):
    def loss(self, x, y):
        return 9 * super().loss(x, y)


class HeavyAndMasked(Masked):
    def loss(self, x, y):
        return 9 * super().loss(x, y)


class HeavyAndByALoop(ByALoopDivided):
    def loss(self, x, y):
        return 9 * super().loss(x, y)


class OfADotProduct(Program):
    def loss(self, x, y):
        error = (self.model(x) - x[:, :3]).flatten()
        return error @ error / len(x)


class OfEqualShares(Program):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none") @ torch.full((len(y),), 1 / len(y))


class ByALoopBesideAMean(ByALoopDivided):
    def loss(self, x, y):
        return super().loss(x, y) + F.mse_loss(self.model(x), x[:, :3])


class OfOneRow(ByReduction):
    def batch(self, step):
        return batch_of(step, 7)


class OfMeansOverRows(Program):
    """The entropy of the mean prediction, for as many classes as rows."""

    def batch(self, step):
        return batch_of(step, 21)

    def loss(self, x, y):
        mean = self.model(x).softmax(1).mean(0)
        return (mean * mean.log()).sum()


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
        PassedAsSum,
        ReturnedAsSum,
        Divided,
        DividedInPlace,
        Multiplied,
        OfDividedTerms,
        OfTermsByATensor,
        ByShares,
        ByLearnedShares,
        OfRowsOfSums,
        WithAPenalty,
        OfCorrelations,
        Masked,
        Scaled,
        ByALoopDivided,
        ByALoopOfParts,
        Distilled,
        DistilledAlone,
        DistilledInPlace,
        HeavyAndDivided,
        HeavyByAShare,
        HeavyOfDividedTerms,
        HeavyAndMasked,
        HeavyAndByALoop,
        OfADotProduct,
        OfEqualShares,
        ByALoopBesideAMean,
        OfOneRow,
        OfMeansOverRows,
        BesideAMeanDivided,
        BesideAMeanByAShare,
        BesideAMeanAtFirst,
    ],
)
def test_other_losses_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, " a sum over rows, made in test_row_losses.py, line ")
    assert not told_of(program, num_workers, "its loss compares rows with each other, through a tensor")
