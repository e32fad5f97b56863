"""Losses that are sums over a tower's rows, or compare them with each other: a warning."""

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

SUMMED = "its loss is a sum over rows, made in test_row_losses.py, line "
COMPARED = "its loss compares rows with each other, through a tensor of "


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


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
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
        OfAStep,
    ],
)
def test_a_sum_that_is_passed_as_a_mean_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers)
    assert len(told) == num_workers
    assert all("call tower.backward_sum(total, tower.rows)" in each for each in told)


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


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [
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


class PerPixel(Program):
    """A sum over the rows and a few features, divided by the number of other ones."""

    def loss(self, x, y):
        return self.model(x).square().sum() / x.numel()


class PartPassedAsSum(OfTheBatch):
    def run(self, tower):
        total = F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"], reduction="sum")
        tower.backward_sum(total / self.rows, tower.rows / self.rows)


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [WeighedByASetting, WeighedInTheCode, PerPixel, PartPassedAsSum])
def test_other_parts_are_not(program, num_workers):
    assert not told_of(program, num_workers, PART)


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


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [MeanAsSum, MeanOverLabelsAsSum, DividedTwice, ReturnedMean, NamedMean])
def test_a_mean_that_is_passed_as_a_sum_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "is a mean, made in test_row_losses.py, line ")
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


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program",
    [OfMeansOfEachRow, MeanOfATower, MeanTimesRows, MeanTimesThree, OfMeansOverAsManyAsRows, NamedSum],
)
def test_other_sums_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "is a mean, made in")


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


class WithASum(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + 0.1 * z.square().sum()


class OfCorrelations(Program):
    """A sum over features, of which there are as many as rows."""

    num_towers = 7

    def batch(self, step):
        return batch_of(step, 21)

    def loss(self, x, y):
        z = self.model(x)
        correlations = z.T @ z / len(z)
        return (correlations.diagonal() - 1).square().sum() + correlations.sum()


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


@pytest.mark.sampled
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
        WithASum,
        OfCorrelations,
        OfOneRow,
        OfMeansOverRows,
    ],
)
def test_other_losses_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers)
    assert not told_of(program, num_workers, PART)
    assert not told_of(program, num_workers, COMPARED)


# ---- pairs of rows --------------------------------------------------------------------------------------


class Contrastive(Program):
    def similarities(self, left, right):
        return left @ right.T

    def loss(self, x, y):
        z = F.normalize(self.model(x))
        return F.cross_entropy(self.similarities(z, F.normalize(x[:, :3])), torch.arange(len(z)))


class OfItself(Contrastive):
    def similarities(self, left, right):
        return torch.einsum("id,jd->ij", left, left)


class OfTwoViews(Program):
    """As SimCLR does."""

    def loss(self, x, y):
        z = F.normalize(torch.cat([self.model(x), self.model(x + torch.randn_like(x))]))
        similarities = (z @ z.T).fill_diagonal_(-9)
        return F.cross_entropy(similarities, torch.arange(len(z)).roll(len(x)))


class ByDistance(Contrastive):
    def similarities(self, left, right):
        return -torch.cdist(left, right)


class ByDifference(Contrastive):
    def similarities(self, left, right):
        return -(left[:, None] - right[None]).square().sum(2)


class ByCosine(Contrastive):
    def similarities(self, left, right):
        return F.cosine_similarity(left[:, None], right, dim=2)


class BroadcastByMistake(Program):
    """[rows, 1] less [rows]."""

    def loss(self, x, y):
        return (self.model(x)[:, :1] - x[:, 0]).square().mean()


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize(
    "program", [Contrastive, OfItself, OfTwoViews, ByDistance, ByDifference, ByCosine, BroadcastByMistake]
)
def test_a_loss_of_pairs_of_rows_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, COMPARED)
    assert len(told) == num_workers
    assert all("call towers.whole_batch(batch, forward, loss)" in each for each in told)


class WithAMetric(Program):
    """Accuracy of nearest neighbours, and labels that are compared."""

    def loss(self, x, y):
        z = self.model(x)
        distances = torch.cdist(z.detach(), z.detach())
        self.correct = (y[distances.topk(2, largest=False).indices[:, 1]] == y).float().mean()
        same = (y[:, None] == y[None]).float().mean(1)
        return (F.cross_entropy(z, y, reduction="none") * same.sign()).mean()


class WithAttention(Program):
    """Of the features of each row."""

    def build(self):
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 3)
        return nn.ModuleList([self.attention, self.embed, self.head])

    def loss(self, x, y):
        tokens = self.embed(x[:, :, None])
        return F.cross_entropy(self.head(self.attention(tokens, tokens, tokens)[0].mean(1)), y)


class WithAFourierTransform(Program):
    """Of the features of each row; its real part is a view of complex numbers."""

    def build(self):
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(12, 3)
        return nn.ModuleList([self.embed, self.head])

    def batch(self, step):
        return batch_of(step, 14)

    def loss(self, x, y):
        z = self.embed(torch.cat([x, x], 1)[:, :, None])
        z = z + torch.fft.fftn(z, dim=(1, 2)).real
        return F.cross_entropy(self.head(z.mean(2)), y)


class WithFactors(Program):
    def loss(self, x, y):
        z = self.model(x)
        z = z * x[:, :1] + (z[:, :, None] * x[:, None, :3]).sum(2)
        return F.cross_entropy(z, y)


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [WithAMetric, WithAttention, WithAFourierTransform, WithFactors])
def test_rows_that_are_compared_beside_the_loss_or_within_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, COMPARED)


# ---- along the rows, or one row after the other ---------------------------------------------------------


class HardRows(Program):
    def loss(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        return losses.topk(1).values.mean()


class ShareOfRows(Program):
    """The dimension was mistaken."""

    def loss(self, x, y):
        return F.cross_entropy(self.model(x).softmax(0), y)


class PartialLikelihood(Program):
    """As Cox's: each row against those that lived longer."""

    def loss(self, x, y):
        risk = self.model(x)[:, 0][x[:, 0].argsort()]
        return (risk.logcumsumexp(0) - risk).mean()


class BySortedPairs(Program):
    def loss(self, x, y):
        scores = self.model(x)[:, 0].sort(descending=True).values
        return scores.diff().square().mean()


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [HardRows, ShareOfRows, PartialLikelihood, BySortedPairs])
def test_a_loss_that_compares_rows_along_their_dimension_is_told_of(program, num_workers):
    told = told_of(program, num_workers, "its loss compares rows with each other, through ")
    assert len(told) == num_workers
    assert all(" over rows in test_row_losses.py, line " in each for each in told)


class Sequence(Program):
    """Takes batches of shape [time, rows, features], as torch's layers do by default."""

    layer: ClassVar = staticmethod(lambda: nn.LSTM(2, 4))
    feed_forward: ClassVar = staticmethod(lambda layer, x: layer(x)[0])

    def build(self):
        torch.manual_seed(0)
        self.layer_of_time, self.head = self.layer(), nn.Linear(4, 3)
        return nn.ModuleList([self.layer_of_time, self.head])

    def series(self, x):
        return torch.stack([x[:, ::2], x[:, 1::2]], 2)  # [time, rows, features], as the program sees it

    def loss(self, x, y):
        hidden = self.feed_forward(self.layer_of_time, self.series(x))
        return F.cross_entropy(self.head(hidden).mean(1), y)


class Recurrent(Sequence):
    layer = staticmethod(lambda: nn.RNN(2, 4))


class Gated(Sequence):
    layer = staticmethod(lambda: nn.GRU(2, 4, num_layers=2, bidirectional=True))
    feed_forward = staticmethod(lambda layer, x: layer(x)[0][..., :4])


class Unbatched(Sequence):
    """Rows without a dimension of time."""

    def series(self, x):
        return x[:, :2]

    def loss(self, x, y):
        return F.cross_entropy(self.head(self.layer_of_time(self.series(x))[0]), y)


class ByCell(Sequence):
    layer = staticmethod(lambda: nn.GRUCell(2, 4))

    @staticmethod
    def feed_forward(layer, x):
        state, states = torch.zeros(x.shape[1], 4), []
        for step in x:
            state = layer(step, state)
            states.append(state)
        return torch.stack(states)


class ByIndex(ByCell):
    @staticmethod
    def feed_forward(layer, x):
        state, states = torch.zeros(x.shape[1], 4), []
        for at in range(len(x)):
            state = layer(x[at], state)
            states.append(state)
        return torch.stack(states)


class OverAttention(Sequence):
    layer = staticmethod(lambda: nn.MultiheadAttention(4, 2))

    @staticmethod
    def feed_forward(layer, x):
        x = torch.cat([x, x], 2)
        return layer(x, x, x, need_weights=False)[0]


class OverWeights(OverAttention):
    """By torch's other kernel."""

    @staticmethod
    def feed_forward(layer, x):
        x = torch.cat([x, x], 2)
        return layer(x, x, x)[0]


class OverEncoder(Sequence):
    layer = staticmethod(lambda: nn.TransformerEncoderLayer(4, 2, 8))

    @staticmethod
    def feed_forward(layer, x):
        return layer(torch.cat([x, x], 2))


OVER_TIME = [Sequence, Recurrent, Gated, Unbatched, ByCell, ByIndex, OverAttention, OverWeights, OverEncoder]


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", OVER_TIME)
def test_batches_that_are_cut_along_time_are_told_of(program, num_workers):
    told = told_of(program, num_workers, "its loss takes rows for time steps, through ")
    assert len(told) == num_workers
    assert all("give towers tensors of shape [rows, time, ...]" in each for each in told)


class RowsFirst(Sequence):
    layer = staticmethod(lambda: nn.LSTM(2, 4, batch_first=True))


class Transposed(Sequence):
    """In each pass."""

    def series(self, x):
        return super().series(x).transpose(0, 1)

    def loss(self, x, y):
        hidden = self.feed_forward(self.layer_of_time, self.series(x))
        return F.cross_entropy(self.head(hidden).mean(0), y)


class TransposedCell(Transposed):
    layer = staticmethod(lambda: nn.GRUCell(2, 4))
    feed_forward = staticmethod(ByCell.feed_forward)


class EncoderOfRows(OverEncoder):
    layer = staticmethod(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))


class RowByRow(Program):
    """Each by itself, as detectors match their boxes."""

    def loss(self, x, y):
        total = torch.zeros(())
        for row, label in zip(x, y, strict=True):
            scores = self.model(row[None])
            total = (total + F.cross_entropy(scores, label[None]) + scores.tanh().abs().mean()).clone()
        return total.div(len(x)) + torch.stack([self.model(each[None]).exp().sum() for each in x]).mean()


class RootOfRows(RowByRow):
    def loss(self, x, y):
        return sum((self.model(row[None]) - 1).square().mean() for row in x).sqrt() / len(x)


class SortedFeatures(Program):
    """The largest of each row, and its shares."""

    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + (z.topk(2).values * z.softmax(1)[:, :2]).cumsum(1).mean()


class SortedLosses(Program):
    """For a metric."""

    def loss(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        self.median = losses.sort().values[len(x) // 2].item()
        return losses.mean()


OVER_ROWS = [RowsFirst, Transposed, TransposedCell, EncoderOfRows, RowByRow, RootOfRows]


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [*OVER_ROWS, SortedFeatures, SortedLosses])
def test_rows_that_are_not_combined_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "its loss takes rows for time steps")
    assert not told_of(program, num_workers, "its loss compares rows")
