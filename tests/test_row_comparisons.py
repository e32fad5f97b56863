"""Losses of rows that were chosen or weighed by comparing rows with each other: a warning."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .cases import mostly_long
from .test_flow import Program
from .test_row_losses import told_of

pytestmark = pytest.mark.sampled

COMPARED = "its loss compares rows with each other, through "
OF_ALL = "The mean of towers' values is not the value of all rows"


def program_of(function):
    """Return a program whose loss is a function of the outputs and the losses of its rows."""

    class OfRows(Program):
        def loss(self, x, y):
            outputs = self.model(x)
            return function(outputs, F.cross_entropy(outputs, y, reduction="none"))

    OfRows.__name__ = function.__name__
    return OfRows


def half(losses):
    return max(1, len(losses) // 2)


# ---- wrong -----------------------------------------------------------------------------------------


def by_indices(outputs, losses):
    return losses[losses.topk(half(losses)).indices].mean()


def by_detached_order(outputs, losses):
    hardest = losses.detach().argsort(descending=True)[: half(losses)]
    return losses.index_select(0, hardest).mean()


def by_order_without_gradients(outputs, losses):
    with torch.no_grad():
        certain = outputs.softmax(1).amax(1).argsort()
    return losses[certain[: half(losses)]].mean()


def above_a_quantile(outputs, losses):
    return torch.where(losses > losses.detach().quantile(0.3), losses, torch.zeros_like(losses)).mean()


def above_a_number(outputs, losses):
    threshold = losses.median().item()
    return (losses * (losses > threshold)).mean()


def above_what_was_sorted(outputs, losses):
    threshold = losses.sort()[0][-half(losses)].detach()
    return (losses * (losses >= threshold)).sum() / half(losses)


def by_a_mask_that_is_filled(outputs, losses):
    mask = torch.zeros_like(losses)
    mask[losses.detach().topk(half(losses)).indices] = 1.0
    return (mask * losses).mean()


def by_ranks(outputs, losses):
    ranks = losses.detach().argsort().argsort()
    return (losses * ranks / len(losses)).mean()


def between_extremes(outputs, losses):
    weights = (losses - losses.min()) / (losses.max() - losses.min())
    return (weights.detach() * losses).mean()


def by_a_softmax(outputs, losses):
    return (losses.detach().softmax(0) * losses).sum()


def the_worst(outputs, losses):
    return losses.max()


def the_median(outputs, losses):
    return losses.median()


CHOSEN = [
    by_indices,
    by_detached_order,
    by_order_without_gradients,
    above_a_quantile,
    above_a_number,
    above_what_was_sorted,
    by_a_mask_that_is_filled,
    by_ranks,
    between_extremes,
    by_a_softmax,
    the_worst,
    the_median,
]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("loss", CHOSEN)
def test_losses_of_chosen_rows_are_told_of_once_on_each_worker(loss, num_workers):
    told = told_of(program_of(loss), num_workers, "its loss ")
    assert len(told) == num_workers
    assert all(COMPARED in each and " over rows in test_row_comparisons.py, line " in each for each in told)


def with_their_variance(outputs, losses):
    return losses.mean() + 0.1 * losses.var()


def their_smooth_maximum(outputs, losses):
    return losses.logsumexp(0)


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("loss", [with_their_variance, their_smooth_maximum])
def test_functions_of_all_losses_are_told_of_once_on_each_worker(loss, num_workers):
    assert len(told_of(program_of(loss), num_workers, OF_ALL)) == num_workers


# ---- right -----------------------------------------------------------------------------------------


def for_the_log(outputs, losses):
    worst, hardest = losses.max().item(), losses.detach().sort()[0][-2:]
    assert worst >= hardest[0]
    return losses.mean()


def in_a_random_order(outputs, losses):
    return losses[torch.rand(len(losses)).argsort()].mean()


def of_classes(outputs, losses):
    best, labels = outputs.detach().softmax(1).max(1)
    certain = F.cross_entropy(outputs, labels, reduction="none") * (best > 0.4)
    return losses.mean() + certain.mean() + outputs.sort(1)[0][:, 0].mean()


def made_stable(outputs, losses):
    shares = (outputs - outputs.max()).exp()
    return losses.mean() - (shares / shares.sum(1, keepdim=True)).log().mean()


def below_a_constant(outputs, losses):
    return (losses * (losses.detach() < 1.2)).mean()


def by_experts(outputs, losses):
    experts = outputs.argmax(1)
    order = experts.sort().indices
    parts = [outputs[order][experts[order] == expert] * (expert + 1) for expert in range(3)]
    return losses.mean() + torch.cat(parts)[order.argsort()].square().mean()


def of_normalized_losses(outputs, losses):
    advantages = losses.detach() - losses.detach().mean()
    return (advantages / (advantages.std() + 1e-5) * losses).mean()


class OfLengths(Program):
    """Rows in the order of their lengths, as recurrent layers want them."""

    def loss(self, x, y):
        packed = pack_padded_sequence(self.model(x), y + 1, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(packed, batch_first=True)[0].square().mean()

    def build(self):
        return torch.nn.Sequential(super().build(), torch.nn.Unflatten(1, (3, 1)))


class InTheOrderOfTheData(Program):
    def loss(self, x, y):
        order = x[:, 0].argsort()
        return F.cross_entropy(self.model(x[order]), y[order])


NOT_CHOSEN = [
    for_the_log,
    in_a_random_order,
    of_classes,
    made_stable,
    below_a_constant,
    by_experts,
    of_normalized_losses,
]


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [*map(program_of, NOT_CHOSEN), OfLengths, InTheOrderOfTheData])
def test_other_losses_are_not(program, num_workers):
    assert not told_of(program, num_workers, "its loss ")


# ---- norms -----------------------------------------------------------------------------------------


def squared(outputs, losses):
    return losses.mean() + 0.1 * (outputs.norm() ** 2 + outputs.norm().square()) / len(outputs)


def squared_by_itself(outputs, losses):
    norm = torch.linalg.norm(outputs)
    return losses.mean() + norm * norm / outputs.numel()


def of_order_one(outputs, losses):
    return losses.mean() + outputs.norm(1) / len(outputs)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 1])
@pytest.mark.parametrize("loss", [squared, squared_by_itself, of_order_one])
def test_norms_that_are_sums_are_no_functions_of_all_rows(loss, num_workers):
    assert not told_of(program_of(loss), num_workers, "its loss ")


def squared_alone(outputs, losses):
    return outputs.norm() ** 2


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
def test_the_square_of_a_norm_is_a_sum(num_workers):
    assert len(told_of(program_of(squared_alone), num_workers, "its loss is a sum over rows")) == num_workers
