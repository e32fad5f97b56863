"""Gradients that are clipped or read before average(), when parameters have none: a warning."""

import copy

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from samestep import Towers

from .cases import mostly_long
from .nets import batch_of, loss_of, net, run_passes
from .simulation import simulate

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([1, 2, 3], 2)


def made(job):
    model = net()
    return model, Towers(model, 5, job=job), torch.optim.SGD(model.parameters(), 0.1)


# ---- wrong -----------------------------------------------------------------------------------------


def after_the_loop(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        towers.average()
        optimizer.step()


def in_the_loop(job):
    model, towers, optimizer = made(job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
        clip_grad_norm_(model.parameters(), 0.01)
    towers.average()
    optimizer.step()


def of_a_list(job):
    model, towers, optimizer = made(job)
    parameters = list(model.parameters())
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
    clip_grad_norm_(parameters, 0.01)
    towers.average()
    optimizer.step()


class InAMethod:
    def __init__(self, job):
        self.model, self.towers, self.optimizer = made(job)
        self.train(batch_of(0))

    def train(self, batch):
        for tower in self.towers(batch):
            tower.backward(loss_of(self.model, tower.batch))
        clip_grad_norm_(self.model.parameters(), max_norm=0.01)
        self.towers.average()
        self.optimizer.step()


def with_a_norm(job):
    model, towers, optimizer = made(job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, torch.tensor(1.0))
    towers.average()
    optimizer.step()


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [after_the_loop, in_the_loop, of_a_list, InAMethod, with_a_norm])
def test_it_is_named(program, num_workers):
    with pytest.warns(UserWarning, match=r"clipped before average\(\) \(test_early_\w+.py, line") as caught:
        outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert len(caught) == 1  # worker 0's


def read_in_the_loop(job):
    model, towers, optimizer = made(job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
    towers.average()
    optimizer.step()


def read_for_a_log(job):
    model, towers, _ = made(job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
    norms = [p.grad.norm() for _, p in model.named_parameters() if p.grad is not None]
    towers.average()
    return norms


def read_of_one(job):
    model, towers, _ = made(job)
    head = model[-1]
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
        norm = 0.0 if head.weight.grad is None else head.weight.grad.norm()
    towers.average()
    return norm


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [read_in_the_loop, read_for_a_log, read_of_one])
def test_a_read_is_named(program, num_workers):
    with pytest.warns(
        UserWarning, match=r"p.grad is read before average\(\) \(test_early_\w+.py, line"
    ) as caught:
        outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert len(caught) == 1  # worker 0's


# ---- right -----------------------------------------------------------------------------------------


def after_average(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()


def of_a_copy(job):
    """An inner loop trains a copy of the model in each pass."""
    model, towers, optimizer = made(job)
    for tower in towers(batch_of(0)):
        learner = copy.deepcopy(model)
        loss_of(learner, tower.batch).backward()
        clip_grad_norm_(learner.parameters(), 0.01)
        tower.backward(loss_of(model, tower.batch))
    towers.average()
    optimizer.step()


def in_turns(job):
    """Two nets; one is clipped while the other one has no average."""
    first, second = made(job), made(job)
    run_passes(first[1], batch_of(0))
    first[1].average()
    for tower in second[1](batch_of(1)):
        tower.backward(loss_of(second[0], tower.batch))
    clip_grad_norm_(first[0].parameters(), 0.01)
    second[1].average()
    clip_grad_norm_((each for each in second[0].parameters()), 0.01)
    clip_grad_norm_([*second[0].parameters()], 0.01)
    for _, _, optimizer in (first, second):
        optimizer.step()


def reset_in_the_loop(job):
    model, towers, optimizer = made(job)
    for tower in towers(batch_of(0)):
        for parameter in model.parameters():
            parameter.grad = None
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        model.zero_grad()
        tower.backward(loss_of(model, tower.batch))
    towers.average()
    optimizer.step()


def of_rows_and_others(job):
    """A saliency map, and gradients of a net beside the model."""
    model, towers, optimizer = made(job)
    other = net()
    for tower in towers(batch_of(0)):
        x = tower.batch["x"].clone().requires_grad_()
        loss_of(other, tower.batch).backward()
        norms = [p.grad.norm() for p in other.parameters()]
        tower.backward(loss_of(model, {"x": x, "y": tower.batch["y"]}))
        norms.append(x.grad.norm())
        other.zero_grad()
    towers.average()
    norms += [p.grad.norm() for p in model.parameters()]
    optimizer.step()


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "program", [after_average, of_a_copy, in_turns, reset_in_the_loop, of_rows_and_others]
)
def test_what_has_gradients_is_not(program, num_workers):
    outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
