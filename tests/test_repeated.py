"""Forwards of whole-batch losses, which run twice: refused on 1, 2 and 3 workers where they compute something
else the second time, or go on from another tower's pass."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers
from samestep.watching.repeated import Repeated

from .cases import mostly_long
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([3, 1, 2], 1)


def spread(outputs, batch):
    pairs = F.normalize(outputs.float(), dim=1)
    return F.cross_entropy(pairs @ pairs.T / 0.1, torch.arange(len(pairs)).roll(1))


class Counting(nn.Linear):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x) / (1 + 0.1 * self.num_calls)


def train(forward, job, model=None, *, prepare=lambda: None, steps=2):
    """Train with `forward(model, rows, what)`, where `what` is what `prepare` has made for this worker."""
    torch.manual_seed(0)
    model = model() if model is not None else nn.Linear(6, 4)
    what, towers = prepare(), Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(step))
        rows[:, 0] = torch.arange(20)
        towers.whole_batch(rows, lambda rows: forward(model, rows, what), spread)
        towers.average()
        optimizer.step()
    return samestep.digest(model)


def hidden_state(model, rows, what):
    outputs = model(rows) + 0.1 * what.get("state", torch.zeros(4))
    what["state"] = outputs.detach().mean(0)
    return outputs


def memory_of_samples(model, rows, what):
    what.append(rows.mean(0))
    return model(rows + torch.stack(what[-3:]).mean(0))


def number_of_calls(model, rows, what):
    what.append(1)
    return model(rows) * (1 + 0.01 * len(what))


def own_generator(model, rows, what):
    return model(rows + torch.randn(rows.shape, generator=what))


def own_generator_by_item(model, rows, what):
    return model(rows * torch.rand(1, generator=what).item())


def own_generator_of_numpy(model, rows, what):
    return model(rows * what.random())


OTHERS = {
    "a hidden state": partial(train, hidden_state, prepare=dict),
    "a memory of samples": partial(train, memory_of_samples, prepare=list),
    "a number of calls": partial(train, number_of_calls, prepare=list),
    "a generator": partial(train, own_generator, prepare=torch.Generator),
    "a generator by item": partial(train, own_generator_by_item, prepare=torch.Generator),
    "a generator of NumPy's": partial(
        train, own_generator_of_numpy, prepare=lambda: np.random.default_rng(0)
    ),
    "a count of a layer": partial(train, lambda model, rows, _: model(rows), model=lambda: Counting(6, 4)),
}


@pytest.mark.filterwarnings("ignore:a pass drew", "ignore:step 0, tower", "ignore:passes changed")
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", OTHERS.values(), ids=OTHERS.keys())
def test_a_second_pass_that_computes_something_else_is_refused(program, num_workers):
    texts = {outcome.text for outcome in simulate(program, num_workers)}
    assert all("step 0, tower" in text for text in texts)
    assert any("forward's second pass changed tensor 0 of its outputs by up to" in text for text in texts)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_what_another_tower_left_is_refused_though_both_passes_make_the_same_of_it(num_workers):
    def forward(model, rows, what):
        number = int(rows[0, 0])
        before = [mean for other, mean in what.items() if other < number]
        what[number] = rows[:, 1:].mean()
        return model(rows[:, 1:] + sum(before))

    for outcome in simulate(
        partial(train, forward, prepare=dict, model=lambda: nn.Linear(5, 4)), num_workers
    ):
        assert isinstance(outcome.error, samestep.UsageError)
        assert "its loss depends on rows or random numbers of tower" in outcome.text


@pytest.mark.long
def test_a_loss_that_workers_compute_apart_is_refused():
    def program(job):
        model = nn.Linear(6, 4)
        calls = [] if job.rank else [0]  # as a list of negatives that a worker that came later does not have
        towers = Towers(model, 7, job=job)
        towers.whole_batch(torch.ones(20, 6), model, lambda outputs, _: outputs.mean() * (1 + len(calls)))
        towers.average()

    for num_workers in (2, 3):
        for outcome in simulate(program, num_workers):
            assert isinstance(outcome.error, samestep.DisagreementError)
            assert "worker 0 has loss of the whole batch = " in outcome.text
            assert "expected it to use no state or generator that differs between workers" in outcome.text


@pytest.mark.filterwarnings("ignore:worker 0 has CPU")
def test_workers_with_other_processors_may_round_a_loss_otherwise(monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr("samestep.towers.towers.fingerprint", lambda device: {"CPU": next(numbers)})

    def program(job):
        model = nn.Linear(6, 4)
        towers = Towers(model, 7, job=job)
        towers.whole_batch(
            torch.ones(20, 6), model, lambda outputs, _: outputs.mean() * (1 + 1e-6 * job.rank)
        )
        return towers.average().rows

    assert values(program, 2) == [20, 20]


@pytest.mark.long
def test_a_loss_may_have_the_same_state_on_all_workers():
    def program(job):
        model, negatives = nn.Linear(6, 4, bias=False), []
        torch.nn.init.eye_(model.weight)

        def loss(outputs, batch):
            negatives.append(outputs.detach())
            return F.cross_entropy(outputs @ torch.cat(negatives[-2:]).T, torch.arange(len(outputs)))

        towers = Towers(model, 7, job=job)
        for step in range(3):
            rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(step))
            towers.whole_batch(rows, model, loss)
            towers.average()
        return model.weight.grad.tolist()

    assert values(program, 1)[0] == values(program, 2)[1] == values(program, 3)[2]


FORWARDS = {
    "no output of forward requires grad": lambda model, rows: model(rows).detach(),
    "parameters already have gradients": lambda model, rows: with_own_backward(model(rows)),
}


def with_own_backward(outputs):
    if outputs.requires_grad:
        outputs.sum().backward(retain_graph=True)
    return outputs


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(("wanted", "forward"), FORWARDS.items())
def test_a_gradient_that_is_not_averaged_is_refused(wanted, forward, num_workers):
    for outcome in simulate(partial(train, lambda model, rows, _: forward(model, rows)), num_workers):
        assert isinstance(outcome.error, samestep.UsageError)
        assert wanted in outcome.text


def test_a_loss_that_trains_itself_needs_no_gradient_of_the_outputs():
    model = nn.ModuleDict({"net": nn.Linear(6, 4).requires_grad_(False), "head": nn.Linear(4, 1)})
    towers = Towers(model, 4)
    towers.whole_batch(torch.ones(8, 6), model["net"], lambda outputs, _: model["head"](outputs).mean())
    towers.average()
    assert model["head"].weight.grad is not None


def augmented(model, rows, _):
    return model(F.dropout(rows, 0.3) * random.random() * np.random.rand())


def written(model, rows, _):
    return model(rows.mul_(2))


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))


class Recurrent(nn.Module):
    """A net whose kernels differ with and without grad."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(2, 5, 2, batch_first=True), nn.Linear(5, 4)

    def forward(self, rows):
        return self.last(self.lstm(rows.view(-1, 3, 2))[0].mean(1))


def in_bfloat16(model, rows, _):
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows)


SAME = {
    "the global generators": partial(train, augmented),
    "a batch that is written": partial(train, written),
    "batch norm and dropout": partial(train, lambda model, rows, _: model(rows), model=net),
    "an LSTM": partial(train, lambda model, rows, _: model(rows), model=Recurrent),
    "bfloat16": partial(train, in_bfloat16, model=net),
}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 2])
@pytest.mark.parametrize("program", SAME.values(), ids=SAME.keys())
def test_a_forward_that_does_the_same_twice_is_let_through(program, num_workers):
    assert len({value for num in (1, num_workers) for value in values(program, num)}) == 1


def test_values_are_compared_as_their_dtype_allows():
    ones = torch.ones(10000, 3)
    assert Repeated([ones, ones]).difference([ones, ones * (1 + 1e-6)]) is None
    assert "tensor 1 " in Repeated([ones, ones]).difference([ones, ones * 1.01])
    assert Repeated([ones.half()]).difference([ones.half() * 1.01]) is None
    assert Repeated([ones.half()]).difference([ones.half() * 1.1])
    assert Repeated([ones.long() * 5000]).difference([ones.long() * 5001])
    assert Repeated([ones > 0]).difference([ones < 0])
    assert Repeated([ones * 1j]).difference([ones * 1.01j])
    assert Repeated([ones[:0]]).difference([ones[:0]]) is None
    assert Repeated([ones * 0]).difference([ones])
    nan = torch.full((3,), torch.nan)
    assert Repeated([nan]).difference([nan]) is None
    assert "finite in only one pass" in Repeated([nan]).difference([torch.ones(3)])
    assert Repeated([torch.ones(3) / 0]).difference([nan - nan]) is None
