"""Gradients of tensors beside the model, which nobody averages: what is computed from them is named."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from samestep import Towers

from .cases import mostly_long
from .nets import batch_of, loss_of, net
from .simulation import simulate

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 1)
NUMBERS = torch.arange(5)


def made(job, **options):
    model = net()
    return model, Towers(model, 6, job=job, **options), SGD(model.parameters(), lr=0.1)


def numbered(step):
    """Return a batch whose rows have numbers, other ones in each step."""
    batch = batch_of(step)
    return {**batch, "number": NUMBERS.roll(step).repeat(len(batch["x"]))[: len(batch["x"])]}


# ---- wrong -----------------------------------------------------------------------------------------


def temperature(job):
    model, towers, optimizer = made(job)
    scale = torch.zeros((), requires_grad=True)
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"]) * scale.exp(), tower.batch["y"]))
        towers.average()
        optimizer.step()
        with torch.no_grad():
            scale -= 0.1 * scale.grad
        scale.grad = None


def new_temperature(job):
    model, towers, optimizer = made(job)
    scale = torch.zeros((), requires_grad=True)
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"]) * scale.exp(), tower.batch["y"]))
        towers.average()
        optimizer.step()
        scale = (scale - 0.1 * scale.grad).detach().requires_grad_()


def prompt(job):
    model, towers, optimizer = made(job)
    shift = nn.Parameter(torch.zeros(1, 6))
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"] + shift), tower.batch["y"]))
        towers.average()
        optimizer.step()
        shift.data.add_(shift.grad, alpha=-0.1)
        shift.grad.zero_()


def table_of_rows(job):
    model, towers, optimizer = made(job)
    table = torch.zeros(5, 6, requires_grad=True)
    for step in range(3):
        for tower in towers(numbered(step)):
            shifted = tower.batch["x"] + table[tower.batch["number"]]
            tower.backward(F.cross_entropy(model(shifted), tower.batch["y"]))
        towers.average()
        optimizer.step()
        with torch.no_grad():
            table += 0.05 * table.grad.sign()
        table.grad.zero_()


def head(job):
    model, towers, optimizer = made(job)
    last = nn.Linear(3, 3)
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(last(model(tower.batch["x"])), tower.batch["y"]))
        towers.average()
        optimizer.step()
        update(last)


def update(module):
    for parameter in module.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


class Trained:
    """A program as a class, which has a tensor beside its model."""

    def __init__(self, job):
        self.model, self.towers, self.optimizer = made(job)
        self.scale = torch.ones(3, requires_grad=True)

    def step(self, batch):
        for tower in self.towers(batch):
            tower.backward(F.cross_entropy(self.model(tower.batch["x"]) * self.scale, tower.batch["y"]))
        self.towers.average()
        self.optimizer.step()
        with torch.no_grad():
            self.scale.sub_(self.scale.grad, alpha=0.1)
        self.scale.grad = None


def of_a_class(job):
    trained = Trained(job)
    for step in range(3):
        trained.step(batch_of(step))


WRONG = {
    temperature: "the loss of later passes",
    new_temperature: "the loss of later passes",
    prompt: "a weight",
    table_of_rows: "the loss of later passes",
    head: "a weight",
    of_a_class: "the loss of later passes",
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_it_is_named(program, num_workers):
    sentence = rf"this worker's passes alone: {WRONG[program]} .* also=\.\.\.\)"
    with pytest.warns(UserWarning, match=sentence) as all_:
        simulate(program, num_workers)
    assert {str(each.message).count("line ") for each in all_} == {1}


# ---- right -----------------------------------------------------------------------------------------


def averaged(job):
    scale = nn.Parameter(torch.zeros(()))
    model, towers, optimizer = made(job, also=[scale])
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"]) * scale.exp(), tower.batch["y"]))
        towers.average()
        optimizer.step()
        with torch.no_grad():
            scale -= 0.1 * scale.grad


def dropped(job):
    model, towers, optimizer = made(job)
    shift = torch.zeros(1, 6, requires_grad=True)
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"] + shift), tower.batch["y"]))
        towers.average()
        optimizer.step()
        if shift.grad is not None:
            shift.grad.zero_()


def logged(job):
    model, towers, optimizer = made(job)
    shift, norms = torch.zeros(1, 6, requires_grad=True), []
    for step in range(3):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(model(tower.batch["x"] + shift), tower.batch["y"]))
        towers.average()
        optimizer.step()
        norms.append(f"{shift.grad.norm():.3f}")
        shift.grad = None


def target_with_gradients(job):
    model, towers, optimizer = made(job)
    target = copy.deepcopy(model)
    for step in range(3):
        for tower in towers(batch_of(step)):
            distance = F.mse_loss(model(tower.batch["x"]), target(tower.batch["x"]))
            tower.backward(distance + loss_of(model, tower.batch))
        towers.average()
        optimizer.step()
        for kept, new in zip(target.parameters(), model.parameters(), strict=True):
            kept.data.lerp_(new.data, 0.1)
            kept.grad = None


def adversarial(job):
    model, towers, optimizer = made(job)
    for step in range(3):
        for tower in towers(batch_of(step)):
            x, y = tower.batch["x"], tower.batch["y"]
            noise = torch.zeros_like(x).requires_grad_()
            gradient, *_ = torch.autograd.grad(F.cross_entropy(model(x + noise), y), noise)
            tower.backward(F.cross_entropy(model(x + 0.1 * gradient.sign()), y))
        towers.average()
        optimizer.step()


def saliency(job):
    model, towers, optimizer = made(job)
    seen = torch.zeros(6)
    for step in range(3):
        for tower in towers(batch_of(step)):
            x = tower.batch["x"].requires_grad_()
            tower.backward(F.cross_entropy(model(x), tower.batch["y"]))
            seen += x.grad.abs().sum(0)
        towers.average()
        optimizer.step()


RIGHT = [averaged, dropped, logged, target_with_gradients, adversarial, saliency]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_others_are_not(program, num_workers):
    outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
