"""Losses that are sums over what they count: tokens, rows, nothing at all."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Step, Towers
from samestep.errors import BatchError, ConfigError, UsageError
from samestep.towers.losses import NamedCounts

from .simulation import simulate, values

PADDING = -100
WORDS = 11


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 6)
        self.recurrent = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)
        self.double()

    def forward(self, words):
        """Return logits [rows, words, WORDS] and the last state [rows, 8]."""
        states, last = self.recurrent(self.embedding(words))
        return self.head(states), last[0]


def sentences(rows, seed=0, longest=9):
    """Return sentences of 0 to `longest` words; what follows a sentence does not count."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (rows, longest + 1), generator=generator)
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    lengths[-2:] = 0
    targets = words[:, 1:].masked_fill(torch.arange(longest) >= lengths[:, None], PADDING)
    return {"words": words[:, :-1], "targets": targets}


def num_tokens(batch):
    return (batch["targets"] != PADDING).sum()


def num_rows(batch):
    return len(batch["words"])


def sums_of(model, batch):
    logits, last = model(batch["words"])
    tokens = F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PADDING, reduction="sum"
    )
    return {"tokens": tokens, "rows": 0.1 * last.square().sum()}


def whole(batch, with_rows):
    """The unsplit loss and its gradient, in float64."""
    model = LanguageModel()
    sums = sums_of(model, batch)
    loss = sums["tokens"] / num_tokens(batch)
    if with_rows:
        loss = loss + sums["rows"] / num_rows(batch)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def assert_same_gradient(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            assert (parameter.grad - gradient).abs().max() <= 1e-10 * max(1, gradient.abs().max())


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [17, 10])
def test_a_mean_over_tokens_is_that_of_the_unsplit_batch(rows):
    model, batch = LanguageModel(), sentences(rows)
    towers = Towers(model, 7)
    for tower in towers(batch):
        tower.backward_sum(sums_of(model, tower.batch)["tokens"], num_tokens(tower.batch))
    report = towers.average()
    loss, gradients = whole(batch, with_rows=False)
    assert_same_gradient(model, gradients)
    assert report.loss == pytest.approx(loss, rel=1e-12)
    assert report.count == num_tokens(batch)
    assert report.losses == {}
    assert math.isnan(report.tower_losses[-1])  # the last sentences are empty


@pytest.mark.long
@pytest.mark.parametrize("rows", [17, 10])
def test_means_over_tokens_and_rows_are_those_of_the_unsplit_batch(rows):
    model, batch = LanguageModel(), sentences(rows)
    towers = Towers(model, 7)
    for tower in towers(batch, counts={"tokens": num_tokens, "rows": num_rows}):
        tower.backward(sums_of(model, tower.batch))
    report = towers.average()
    loss, gradients = whole(batch, with_rows=True)
    assert_same_gradient(model, gradients)
    assert report.loss == pytest.approx(loss, rel=1e-12)
    assert list(report.losses) == ["tokens", "rows"]
    assert sum(report.losses.values()) == report.loss
    assert report.losses["tokens"] == pytest.approx(whole(batch, with_rows=False)[0], rel=1e-12)
    assert report.count == num_tokens(batch) + rows


@pytest.mark.long
def test_tower_losses_are_the_sums_of_each_towers_own_means():
    model, batch = LanguageModel(), sentences(14)
    towers, expected = Towers(model, 7), []
    for tower in towers(batch, counts={"tokens": num_tokens, "rows": num_rows}):
        sums = sums_of(model, tower.batch)
        tokens = sums["tokens"] / num_tokens(tower.batch) if num_tokens(tower.batch) else 0
        expected.append((tokens + sums["rows"] / 2).item())
        tower.backward(sums)
    assert num_tokens(tower.batch) == 0
    assert towers.average().tower_losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    "nothing",
    [lambda model: torch.zeros(()), lambda model: 0 * model.head.weight.sum()],
    ids=["constant", "0·x"],
)
@pytest.mark.parametrize("empty", [{3}, {0, 1, 2, 4, 5, 6}, {0}, {6}])
def test_towers_that_count_nothing_add_nothing(nothing, empty):
    model, batch = LanguageModel(), sentences(14, seed=1)
    parts = batch["targets"].unflatten(0, (7, 2))
    for tower in range(7):
        parts[tower, 0, :] = PADDING if tower in empty else 5
        parts[tower, 1, :] = PADDING
    towers = Towers(model, 7)
    for tower in towers(batch):
        if tower.index in empty:
            tower.backward_sum(nothing(model), 0)
        else:
            tower.backward_sum(sums_of(model, tower.batch)["tokens"], num_tokens(tower.batch))
    report = towers.average()
    loss, gradients = whole(batch, with_rows=False)
    assert_same_gradient(model, gradients)
    assert report.loss == pytest.approx(loss, rel=1e-12)
    assert {tower for tower, own in enumerate(report.tower_losses) if math.isnan(own)} == empty


def test_a_name_that_counts_nothing_adds_nothing_even_where_its_sum_is_not_finite():
    model, batch = LanguageModel(), sentences(9)
    towers = Towers(model, 4)
    for tower in towers(batch, counts={"tokens": num_tokens, "pictures": lambda part: 0}):
        tokens = sums_of(model, tower.batch)["tokens"]
        tower.backward({"tokens": tokens, "pictures": tokens * math.nan})
    report = towers.average()
    assert_same_gradient(model, whole(batch, with_rows=False)[1])
    assert math.isnan(report.losses["pictures"])
    assert report.loss == report.losses["tokens"]


def test_float32_and_half_precision_sums_may_be_mixed():
    model = nn.Linear(3, 1)
    towers = Towers(model, 2)
    for tower in towers(torch.ones(4, 3), counts={"a": len, "b": len}):
        total = model(tower.batch).sum()
        tower.backward({"b": total.half(), "a": total.double()})
    assert towers.average().losses["a"] == pytest.approx(model(torch.ones(1, 3)).item())
    assert torch.allclose(model.weight.grad, torch.full((1, 3), 2.0))


# ---- nothing counts --------------------------------------------------------------------------------


class Normed(LanguageModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()

    def forward(self, words):
        logits, last = super().forward(words)
        return logits, self.norm(last)


def make(named, **settings):
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    towers = Towers(model, 3, **settings)

    def as_sum(model, part):
        return samestep.LossSum(sums_of(model, part)["tokens"], num_tokens(part))

    weights = {"tokens": num_tokens, "more tokens": num_tokens} if named else None
    loss_fn = as_sum if not named else lambda m, part: dict.fromkeys(weights, as_sum(m, part).total)
    return Step(
        towers,
        loss_fn,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        averaged_model=torch.optim.swa_utils.AveragedModel(model),
        counts=weights,
    )


def state_of(step):
    return (
        samestep.digest(step.towers.model),
        samestep.digest(step.averaged_model),
        str(step.optimizer.state_dict()),
        step.scheduler.state_dict(),
    )


@pytest.mark.sampled(50)
@pytest.mark.parametrize("named", [False, True])
def test_a_batch_in_which_nothing_counts_stops_before_the_update(named):
    step, batch = make(named), sentences(9)
    step(batch)
    before = state_of(step)
    what = "counts of tokens, more tokens" if named else "counts"
    with pytest.raises(BatchError, match=f"step 1: the towers' {what} add up to 0, .*on_zero_count='skip'"):
        step({**batch, "targets": torch.full_like(batch["targets"], PADDING)})
    assert state_of(step) == before
    assert all(p.grad is None for p in step.towers.model.parameters())
    assert step(batch).step == 1  # and training can go on


@pytest.mark.parametrize("named", [False, True])
def test_or_is_skipped(named):
    step, batch = make(named, on_zero_count="skip"), sentences(9)
    step(batch)
    before = state_of(step)
    report = step({**batch, "targets": torch.full_like(batch["targets"], PADDING)})
    assert report.skipped
    assert report.step == 1
    assert report.count == 0
    assert math.isnan(report.loss)
    assert all(math.isnan(loss) for loss in (*report.losses.values(), *report.tower_losses))
    assert state_of(step) == before
    assert all(p.grad is None for p in step.towers.model.parameters())
    report = step(batch)
    assert (report.step, report.skipped) == (2, False)


# ---- misuse ----------------------------------------------------------------------------------------


def hand_in(losses, count=None, counts=None):
    model = nn.Linear(3, 1)
    towers = Towers(model, 2)
    total = model(torch.ones(4, 3)).sum()
    for tower in towers(torch.ones(4, 3), counts=counts):
        if count is None:
            tower.backward(losses(total))
        else:
            tower.backward_sum(losses(total), count)


AB = {"a": len, "b": len}


@pytest.mark.parametrize(
    ("losses", "count", "counts", "message"),
    [
        (lambda x: {"a": x}, None, AB, "has sums for a, expected one for each name in counts: a, b"),
        (lambda x: {"a": x, "b": x, "c": x}, None, AB, "has sums for a, b, c, expected one for each"),
        (lambda x: {}, None, AB, "has sums for nothing, expected"),
        (
            lambda x: x,
            None,
            AB,
            "loss is a Tensor, expected a mapping with a sum for each name in counts: a, b",
        ),
        (lambda x: {"a": x, "b": x[None].expand(2)}, None, AB, r"loss\['b'\] has shape \(2,\)"),
        (lambda x: {"a": x.detach(), "b": x.detach()}, None, AB, "none of the sums requires grad"),
        (lambda x: {"a": x, "b": x}, 3, AB, "backward_sum cannot be used in a step .* with counts"),
        (lambda x: {"a": x}, None, None, r"the step was started without counts: .*counts={name: count"),
        (lambda x: x, torch.ones(2), None, r"count has shape \(2,\)"),
        (lambda x: x.detach(), 2, None, "total does not require grad"),
    ],
)
def test_losses_that_do_not_fit_the_counts(losses, count, counts, message):
    with pytest.raises(UsageError, match=rf"Tower\(index=0, rows=2\): .*{message}"):
        hand_in(losses, count, counts)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_are_none(weight, as_tensor):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = samestep.digest(model)
    for on_zero_count in ("raise", "skip"):
        towers = Towers(model, 3, on_zero_count=on_zero_count)
        for tower in towers(torch.ones(6, 3)):
            own = weight if tower.index == 1 else 4.0
            tower.backward_sum(model(tower.batch).sum(), torch.tensor(own) if as_tensor else own)
        with pytest.raises(BatchError, match=f"step 0: tower 1 has the count {weight:g}, expected a finite"):
            towers.average()
        assert samestep.digest(model) == before
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (lambda part: -1, "tower 0: the count of a is -1, expected a finite number of at least 0"),
        (lambda part: math.inf, "tower 0: the count of a is inf, expected"),
        (lambda part: math.nan, "tower 0: the count of a is nan, expected"),
        (lambda part: part, r"tower 0: the count of a has shape \(2, 3\), expected one number"),
        (lambda part: None, "tower 0: the count of a is None, expected a number or 0-dim tensor"),
        (lambda part: "3", "tower 0: the count of a is '3', expected a number or 0-dim tensor"),
        (lambda part: {"tokens": 3}, "tower 0: the count of a is {'tokens': 3}, expected a number"),
        (lambda part: torch.tensor(3j), "tower 0: the count of a is complex, expected a real number"),
    ],
)
def test_counts_that_are_none(count, message):
    with pytest.raises(BatchError, match=message):
        hand_in(lambda x: {"a": x}, counts={"a": count})


@pytest.mark.parametrize("weights", [{}, {"a": 3}, len, ["a"]])
def test_weights_that_are_no_mapping_of_functions(weights):
    with pytest.raises(ConfigError, match="expected a mapping from the name of each sum to a function"):
        hand_in(lambda x: {"a": x}, counts=weights)
    with pytest.raises(ConfigError, match="expected a mapping from the name of each sum to a function"):
        Step(Towers(nn.Linear(1, 1), 1), len, None, counts=weights)


def test_on_zero_count_is_one_of_two():
    with pytest.raises(ConfigError, match="on_zero_count = 'ignore': expected 'raise' or 'skip'"):
        Towers(nn.Linear(1, 1), 1, on_zero_count="ignore")


def test_totals_are_exact_for_counts():
    counts = torch.tensor([[2**40 + 1, 0.5], [3, 0.25]], dtype=torch.float64)
    assert NamedCounts(("a", "b"), counts, rows=4).totals == [2**40 + 4, 0.75]


# ---- counts that depend on more than rows --------------------------------------------------------------


def counted(count, job, steps=2):
    """Train with a sum that `count(rows, what)` counts, where `what` is a list of this worker's."""
    torch.manual_seed(0)
    model, what = nn.Linear(3, 1), []
    towers = Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(step))
        for tower in towers(rows, counts={"sum": lambda rows: count(rows, what)}):
            tower.backward({"sum": model(tower.batch).square().sum()})
        towers.average()
        optimizer.step()
    return samestep.digest(model), torch.rand(1).item()


def test_counts_draw_from_a_tower_s_own_streams():
    def count(rows, _):
        return 1 + torch.rand(1) + random.random() + np.random.rand()

    first = values(partial(counted, count), 1)[0]
    assert {*values(partial(counted, count), 2), *values(partial(counted, count), 3)} == {first}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nn.Linear(3, 1)
        assert first[1] == torch.rand(1).item()  # the program's own go on as if nothing had been counted


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_count_that_depends_on_those_before_is_refused(num_workers):
    def count(rows, what):
        what.append(0)
        return len(what)

    for outcome in simulate(partial(counted, count), num_workers):
        assert isinstance(outcome.error, UsageError)
        assert "the count of sum is 1, but 2 when counted again" in outcome.text


@pytest.mark.long
def test_a_count_may_write_to_its_rows():
    def count(rows, _):
        return rows.mul_(2).square().sum()

    assert len({value for num in (1, 2, 3) for value in values(partial(counted, count), num)}) == 1
