"""Losses that combine a tower's rows with each other: a warning."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .cases import mostly_long
from .nets import batch_of
from .test_flow import Program
from .test_row_losses import told_of

pytestmark = pytest.mark.sampled

COMPARED = "its loss compares rows with each other, through a tensor of "


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


class OfAttention(Contrastive):
    """Torch's layer has rows in second place, and flattens them time by time."""

    def build(self):
        torch.manual_seed(0)
        self.attention, self.embed = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(1, 4)
        self.query = nn.Parameter(torch.ones(1, 1, 4))
        self.head = nn.Linear(6, 4)
        model = nn.ModuleList([self.attention, self.embed, self.head])
        model.register_parameter("query", self.query)
        return model

    def loss(self, x, y):
        similarities = self.head(x) @ self.pooled(self.embed(x[:, :, None])).T
        return -F.logsigmoid(similarities * (2 * torch.eye(len(x)) - 1)).sum(1).mean()

    def pooled(self, tokens):
        return self.attention(tokens, tokens, tokens)[0].mean(1)


class OfPooledTokens(OfAttention):
    """As SigLIP does: queries have no rows."""

    def pooled(self, tokens):
        return self.attention(self.query.repeat(len(tokens), 1, 1), tokens, tokens)[0][:, 0]


class HardestPairs(Program):
    """Chosen without a gradient, as miners of triplets do."""

    def loss(self, x, y):
        z = self.model(x)
        with torch.no_grad():
            hardest = (torch.cdist(z, z) + 9 * (y[:, None] == y[None])).argmin(1)
        return F.triplet_margin_loss(z, x[:, :3], z[hardest])


class WeightsByNeighbours(Program):
    def loss(self, x, y):
        z = self.model(x)
        density = (z.detach() @ z.detach().T).exp().sum(1)
        return (F.cross_entropy(z, y, reduction="none") / density).mean()


class BroadcastByMistake(Program):
    """[rows, 1] less [rows]."""

    def loss(self, x, y):
        return (self.model(x)[:, :1] - x[:, 0]).square().mean()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program",
    [
        Contrastive,
        OfItself,
        OfTwoViews,
        ByDistance,
        ByDifference,
        ByCosine,
        BroadcastByMistake,
        HardestPairs,
        WeightsByNeighbours,
        OfAttention,
        OfPooledTokens,
    ],
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


class WithAnEncoder(Program):
    """Of torch's, which has time in front within its layers."""

    def build(self):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 3)
        return nn.ModuleList([self.encoder, self.embed, self.head])

    def loss(self, x, y):
        return F.cross_entropy(self.head(self.encoder(self.embed(x[:, :, None])).mean(1)), y)


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


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program", [WithAMetric, WithAttention, WithAnEncoder, WithAFourierTransform, WithFactors]
)
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


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("program", [HardRows, ShareOfRows, PartialLikelihood, BySortedPairs])
def test_a_loss_that_compares_rows_along_their_dimension_is_told_of(program, num_workers):
    told = told_of(program, num_workers, "its loss compares rows with each other, through ")
    assert len(told) == num_workers
    assert all(" over rows in test_row_combinations.py, line " in each for each in told)


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


class InATotal(Sequence):
    """Of tokens."""

    def run(self, tower):
        hidden = self.feed_forward(self.layer_of_time, self.series(tower.batch["x"]))
        labels = tower.batch["y"][:, None].expand(-1, 3).flatten()
        total = F.cross_entropy(self.head(hidden).flatten(0, 1), labels, reduction="sum")
        tower.backward_sum(total, labels.numel())


OVER_TIME = [
    Sequence,
    InATotal,
    Recurrent,
    Gated,
    Unbatched,
    ByCell,
    ByIndex,
    OverAttention,
    OverWeights,
    OverEncoder,
]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
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


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("program", [*OVER_ROWS, SortedFeatures, SortedLosses])
def test_rows_that_are_not_combined_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "its loss takes rows for time steps")
    assert not told_of(program, num_workers, "its loss compares rows")


# ---- quotients of sums over rows -------------------------------------------------------------------------


class Dice(Program):
    def loss(self, x, y):
        return self.dice(self.model(x).softmax(1), F.one_hot(y, 3).float())

    def dice(self, shares, truth):
        return 1 - (2 * (shares * truth).sum() + 1) / (shares.sum() + truth.sum() + 1)


class DiceOfClasses(Dice):
    def dice(self, shares, truth):
        both, either = (shares * truth).sum(0), shares.sum(0) + truth.sum(0)
        return (1 - 2 * both / either.clamp(min=1e-6)).mean()


class Overlap(Dice):
    """Beside another loss."""

    def dice(self, shares, truth):
        both = (shares * truth).sum()
        return 0.5 * (1 - both / (shares.sum() + truth.sum() - both)) + F.mse_loss(shares, truth)


class ByLearnedWeights(Program):
    def loss(self, x, y):
        z = self.model(x)
        weights = z.square().sum(1)
        return (weights * F.cross_entropy(z, y, reduction="none")).sum() / weights.sum()


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [Dice, DiceOfClasses, Overlap, ByLearnedWeights])
def test_a_quotient_of_sums_over_rows_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(
        program, num_workers, "its loss has a quotient of sums over rows in test_row_combinations.py, line "
    )
    assert len(told) == num_workers
    assert not told_of(program, num_workers)  # it is no sum


class RootOfAMean(Program):
    def loss(self, x, y):
        return F.mse_loss(self.model(x), x[:, :3]).sqrt()


class LogOfAMean(Program):
    """As in bounds of mutual information."""

    def loss(self, x, y):
        scores = self.model(x)[:, 0]
        return -(scores.mean() - scores.flip(0).exp().mean().log())


class FocalOfAMean(Program):
    """It should be of each row."""

    def loss(self, x, y):
        entropy = F.cross_entropy(self.model(x), y)
        return (1 - torch.exp(-entropy)) ** 2 * entropy


class NormOfAll(Program):
    def loss(self, x, y):
        return torch.linalg.vector_norm(self.model(x) - x[:, :3])


class Flooded(Program):
    def loss(self, x, y):
        return (F.cross_entropy(self.model(x), y) - 0.5).abs() + 0.5


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("program", [RootOfAMean, LogOfAMean, FocalOfAMean, NormOfAll, Flooded])
def test_a_nonlinear_function_of_a_mean_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, "The mean of towers' values is not the value of all rows")
    assert len(told) == num_workers
    assert all(" over rows in test_row_combinations.py, line " in each for each in told)


class OfOneTower(RootOfAMean):
    num_towers = 1


class NormOfRows(Program):
    def loss(self, x, y):
        return torch.linalg.vector_norm(self.model(x) - x[:, :3], dim=1).mean()


class ByUncertainty(Program):
    """A learnt weight of the loss, a perplexity for the log, and a loss that must be a number."""

    def build(self):
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 3), nn.Linear(1, 1)
        return nn.ModuleList([self.layer, self.scale])

    def loss(self, x, y):
        entropy = F.cross_entropy(self.layer(x), y)
        self.perplexity = entropy.exp()
        log_scale = self.scale(torch.ones(1)).squeeze()
        return torch.nan_to_num(entropy * (-log_scale).exp() + log_scale.abs())


class DiceOfRows(Dice):
    """One for each."""

    def dice(self, shares, truth):
        both = (shares * truth).sum(1)
        return (1 - (2 * both + 1) / (shares.sum(1) + truth.sum(1) + 1)).mean()


class DiceAsMetric(Dice):
    def dice(self, shares, truth):
        self.metric = (shares * truth).sum() / shares.sum()
        return F.mse_loss(shares, truth)


class ByConstants(Dice):
    """Weights of classes, and a scale that has no gradient."""

    def dice(self, shares, truth):
        weights = truth.sum(0) / truth.sum()
        losses = F.mse_loss(shares, truth, reduction="none")
        return (weights * losses).mean() / losses.sum().detach().clamp(min=1)


class ByALayer(Dice):
    """Normalised by its weights."""

    def dice(self, shares, truth):
        weight = self.model[0].weight
        return F.mse_loss(shares, truth) + (weight / weight.sum()).square().sum()


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program", [DiceOfRows, DiceAsMetric, ByConstants, ByALayer, NormOfRows, ByUncertainty]
)
def test_other_functions_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "is not the value of all rows")


def test_a_single_tower_has_all_rows():
    assert not told_of(OfOneTower, 1, "is not the value of all rows")


# ---- statistics of features ------------------------------------------------------------------------------


class SpreadOfFeatures(Program):
    """As VICReg's hinge on the standard deviation of each feature."""

    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + 0.1 * F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()


class Covariances(Program):
    def loss(self, x, y):
        z = self.model(x)
        centred = z - z.mean(0)
        covariances = centred.T @ centred / (len(z) - 1)
        return F.cross_entropy(z, y) + covariances.fill_diagonal_(0).pow(2).sum() / 3


class CrossCorrelations(Program):
    """As Barlow Twins."""

    def loss(self, x, y):
        found = torch.einsum("ni,nj->ij", self.model(x), self.model(x * 1.1)) / len(x)
        return (found - torch.eye(3)).square().sum()


class DistanceOfMeans(Program):
    """As a linear maximum mean discrepancy of two domains."""

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y) + F.mse_loss(self.model(x).mean(0), self.model(-x).mean(0))


class LoadOfExperts(Program):
    """As in Switch Transformers."""

    def loss(self, x, y):
        shares = self.model(x).softmax(1)
        load = F.one_hot(shares.argmax(1), 3).float().mean(0)
        return F.cross_entropy(shares, y) + 0.01 * 3 * (load * shares.mean(0)).sum()


class CountsOfExperts(Program):
    """As in Mixtral's loss in transformers."""

    def loss(self, x, y):
        shares = self.model(x).softmax(1)
        chosen = shares.topk(2, dim=1).indices.reshape(-1)
        counts = torch.zeros(3) + torch.histc(chosen.float(), bins=3, min=0, max=3)
        total = torch.zeros(3) + shares.sum(0)
        load = (counts / len(x) * (total / len(x))).sum()
        return F.cross_entropy(shares, y) + 0.01 * 3 * load


class EntropyOfTheMean(Program):
    """As information maximisation, which wants all classes to be used."""

    def loss(self, x, y):
        shares = self.model(x).softmax(1)
        of_all = shares.mean(dim=0)
        return -(shares * shares.log()).sum(1).mean() + (of_all * of_all.log()).sum()


class EntropyOfCodes(Program):
    """As lookup-free quantization, which wants all codes to be used; `einsum` has rows in second place."""

    def loss(self, x, y):
        z = self.model(x)
        codes = torch.einsum("... i d, j d -> ... i j", z[:, None], torch.tensor([[1.0, 2, 3], [3, 2, 1]]))
        of_all = codes.softmax(-1).mean(0)
        return F.cross_entropy(z, y) + (of_all * of_all.log()).sum()


class InPlace(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + z.mean(0).clone().tanh_().sum()


STATISTICS = [
    *(SpreadOfFeatures, Covariances, CrossCorrelations, DistanceOfMeans, LoadOfExperts, EntropyOfTheMean),
    *(EntropyOfCodes, InPlace, CountsOfExperts),
]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("program", STATISTICS)
def test_a_loss_of_statistics_of_features_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, " of features over rows in test_row_combinations.py, line ")
    assert len(told) == num_workers
    assert all("The mean of towers' values is not the value of all rows" in each for each in told)


class NormalisedByHand(Program):
    """As a layer does."""

    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy((z - z.mean(0)) / (z.var(0) + 1e-5).sqrt(), y)


class LessTheMean(Program):
    def loss(self, x, y):
        z = self.model(x)
        return (z - x[:, :3].mean(0)).square().mean() + F.cross_entropy(z * x.std(0)[:3], y)


class LinearInTheMean(Program):
    """Of the features, by weights and by steps that leave it a mean."""

    def loss(self, x, y):
        z = self.model(x)
        weights = torch.tensor([0.1, 0.2, 0.3])
        return (
            F.cross_entropy(z, y)
            + (z.mean(0) * weights).sum()
            + (z.mean(0, keepdim=True) @ torch.eye(3)).mean()
        )


class MomentsAsMetric(Program):
    def loss(self, x, y):
        z = self.model(x)
        self.spread = z.std(0).square().sum().item()
        return F.cross_entropy(z, y)


class MomentsOfWeights(Program):
    def loss(self, x, y):
        weight = self.model[0].weight
        return F.cross_entropy(self.model(x), y) + weight.mean(0).square().sum() + weight.var(0).sum()


class CodesOfEachRow(Program):
    def loss(self, x, y):
        z = self.model(x)
        codes = torch.einsum("... i d, j d -> ... i j", z[:, None], torch.tensor([[1.0, 2, 3], [3, 2, 1]]))
        return F.cross_entropy(z, y) + codes.log_softmax(-1).exp().square().mean()


class MomentsOfEachRow(Program):
    def loss(self, x, y):
        z = self.model(x)
        return F.cross_entropy(z, y) + z.var(1).mean() + z.mean(1).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize(
    "program",
    [
        *(NormalisedByHand, LessTheMean, LinearInTheMean, MomentsAsMetric, MomentsOfWeights),
        *(MomentsOfEachRow, CodesOfEachRow),
    ],
)
def test_other_statistics_are_not_told_of(program, num_workers):
    assert not told_of(program, num_workers, "is not the value of all rows")
