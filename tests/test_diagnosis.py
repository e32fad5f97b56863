"""Gradients that are not finite, traced to tower, rows and first parameter, in one process."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Step, Towers
from samestep.errors import NonFiniteError
from samestep.towers.diagnosis import first_nonfinite


class Net(nn.Module):
    """`scale` gets an infinite gradient where a row's root is that of 0; `first` does not depend on it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.frozen + (self.scale * x.abs()).sqrt())


def batch_of(rows=11, zeros=()):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    x[list(zeros), 0] = 0
    return x, torch.arange(rows) % 2


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make(loss_fn=loss_of, num_towers=4, **settings):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step(Towers(model, num_towers), loss_fn, optimizer, **settings)


def message_of(step, batch):
    with pytest.raises(NonFiniteError) as raised:
        step(batch)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_finite_loss_with_a_gradient_that_is_not():
    step = make()
    step(batch_of())
    before = samestep.digest(step.towers.model)
    message = message_of(step, batch_of(zeros=[4]))
    assert re.fullmatch(
        r"step 1: the averaged gradient is not finite \(tower 1, rows 3 to 5, loss \d\.\d+, "
        r"first in the gradient of scale\); nothing was updated",
        message,
    )
    assert samestep.digest(step.towers.model) == before  # weights and batch-norm statistics
    assert not step(batch_of()).skipped


def test_several_towers():
    message = message_of(make(), batch_of(zeros=[0, 10]))
    assert re.findall(r"tower (\d)", message) == ["0", "3"]


def test_a_loss_that_is_not_finite():
    inputs, labels = batch_of()
    inputs[4] = math.nan
    message = message_of(make(), (inputs, labels))
    assert "(tower 1, rows 3 to 5, loss nan, first in the gradient of scale)" in message


def test_many_towers_are_counted():
    message = message_of(make(num_towers=11, loss_fn=lambda m, b: m.last(b[0]).sum() * math.inf), batch_of())
    assert len(re.findall(r"tower \d+, rows", message)) == 4
    assert "; and 7 more); nothing was updated" in message


def test_sums_that_overflow_although_each_towers_gradient_is_finite():
    message = message_of(make(lambda model, batch: model.last.bias.sum() * 1.5e38), batch_of())
    assert "(the loss and the gradient of each tower are finite)" in message


def test_a_loss_function_that_fails_when_it_runs_again_hides_nothing():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("once too often")
        return loss_of(model, batch)

    step = make(loss_fn)
    message = message_of(step, batch_of(zeros=[0, 10]))
    assert "(tower 0, rows 0 to 2" in message
    assert "tower 3" not in message
    assert not any(layer._forward_hooks for layer in step.towers.model.modules())


def test_the_passes_run_again_as_they_ran():
    """The same random numbers, buffers, rows, and number of the step."""
    seen = []

    def loss_fn(model, batch):
        noise = torch.rand(1).item()
        seen.append((noise, model.norm.running_mean.tolist(), batch[0].sum().item(), step.towers.step))
        return loss_of(model, batch) * (math.nan if noise > 0.9 else 1)

    step = make(loss_fn)
    with pytest.raises(NonFiniteError):  # noqa: PT012 - until a random number is above 0.9
        for _ in range(50):
            seen.clear()
            step(batch_of())
    assert len(seen) == 8
    assert seen[4:] == seen[:4]


def test_generators_and_gradients_are_left_alone():
    step = make()
    before = torch.get_rng_state()
    message_of(step, batch_of(zeros=[4]))
    assert torch.equal(torch.get_rng_state(), before)
    assert not step.towers.model.scale.grad.isfinite().all()
    assert step.towers.step == 1


def test_skipping_does_not_look_and_leaves_the_model_alone():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return loss_of(model, batch)

    step = make(loss_fn, on_nonfinite="skip")
    before = samestep.digest(step.towers.model)
    assert step(batch_of(zeros=[4])).skipped
    assert len(calls) == 4
    assert samestep.digest(step.towers.model) == before


def test_towers_without_rows_and_sums_with_names():
    model = Net()
    model.norm.eval()  # a tower of one row has nothing to normalise with
    towers = Towers(model, 7)
    run = {"counts": {"rows": lambda part: len(part[0])}}

    def hand_in(tower):
        tower.backward({"rows": loss_of(model, tower.batch) * tower.rows})

    for tower in towers(batch_of(5, zeros=[2]), **run):
        hand_in(tower)
    towers.average()
    assert first_nonfinite(towers, hand_in) == [None, None, "scale", None, None, None, None]


def test_a_loss_of_the_whole_batch_that_is_not_finite_leaves_weights_and_buffers():
    def loss_fn(model, outputs, batch):
        return F.cross_entropy(outputs, batch[1]) * math.nan

    step = make(loss_fn, forward=lambda model, batch: model(batch[0]))
    before = samestep.digest(step.towers.model)
    assert "(the loss of the whole batch, 11 rows, is nan); nothing" in message_of(step, batch_of())
    assert samestep.digest(step.towers.model) == before


def test_buffers_can_be_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    for statistics in ("mean", "pooled", "first"):
        towers = Towers(copy.deepcopy(model), 4, statistics=statistics)
        before = samestep.digest(towers.model)
        for tower in towers(batch_of()):
            tower.backward(loss_of(towers.model, tower.batch))
        towers.average()
        assert samestep.digest(towers.model) != before
        towers._last.run.put_back()
        assert samestep.digest(towers.model) == before
