"""Schedules and learning rates that passes change: an error on all workers where two passes share one."""

import math

import numpy as np
import pytest
import torch

import samestep
from samestep import Towers
from samestep.errors import UsageError

from .nets import batch_of, loss_of, net
from .simulation import simulate, values

NUM_TOWERS = 7


class Loop:
    """A training loop, which calls `in_pass` within each pass, and `after_pass` after its backward."""

    def __init__(self, job):
        torch.manual_seed(0)
        self.model, self.num_passes = net(), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.schedule = self.make_schedule()
        towers = Towers(self.model, NUM_TOWERS, job=job)
        for self.step in range(2):
            for tower in towers(batch_of(self.step, 21)):
                self.in_pass()
                tower.backward(loss_of(self.model, tower.batch))
                self.after_pass()
                del tower
            towers.average()
            self.optimizer.step()
        self.digest = samestep.digest(self.model)

    def make_schedule(self):
        return torch.optim.lr_scheduler.LinearLR(self.optimizer)

    def in_pass(self):
        pass

    def after_pass(self):
        pass


class InPass(Loop):
    def in_pass(self):
        self.schedule.step()


class AfterPass(Loop):
    def after_pass(self):
        self.schedule.step()


class NotYet(AfterPass):
    """Advances a schedule that changes the learning rate much later."""

    def make_schedule(self):
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)


class Nested(AfterPass):
    def make_schedule(self):
        parts = [torch.optim.lr_scheduler.LinearLR(self.optimizer) for _ in range(2)]
        return torch.optim.lr_scheduler.ChainedScheduler(parts)


class Momentum(AfterPass):
    def make_schedule(self):
        return torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)


class ByHand(Loop):
    def after_pass(self):
        self.num_passes += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.num_passes


class InTensor(ByHand):
    def make_schedule(self):
        self.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)

    def after_pass(self):
        self.optimizer.param_groups[0]["lr"].mul_(0.9)


class InNumPy(ByHand):
    def after_pass(self):
        self.num_passes += 1
        self.optimizer.param_groups[0]["lr"] = np.float32(0.1 / self.num_passes)


class Waiting(AfterPass):
    """Parts that change the learning rate much later."""

    def make_schedule(self):
        parts = [torch.optim.lr_scheduler.StepLR(self.optimizer, size) for size in (700, 1000)]
        return torch.optim.lr_scheduler.ChainedScheduler(parts)


class Betas(ByHand):
    """Options in a list, and in tensors that are written in place."""

    def make_schedule(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.param_groups[0]["betas"] = [torch.tensor(0.9), torch.tensor(0.99)]

    def after_pass(self):
        self.optimizer.param_groups[0]["betas"][0].mul_(0.999)


class InOnePass(Loop):
    """Changes the learning rate in one pass of the step."""

    def after_pass(self):
        self.num_passes += 1
        if self.num_passes == 2:
            self.optimizer.param_groups[0]["lr"] = 0.01


class Rarely:
    """A schedule of the program's own, that changes the learning rate in no pass of the test."""

    def __init__(self, optimizer):
        self.optimizer, self.num_calls, self.factors = optimizer, 0, [0.1, 0.01]

    def step(self):
        self.num_calls += 1
        if self.num_calls == 1000:
            self.optimizer.param_groups[0]["lr"] *= self.factors[0]


class OfItsOwn(AfterPass):
    def make_schedule(self):
        return Rarely(self.optimizer)


class Logged(Loop):
    """A trainer and a meter, which have the optimizer and count passes."""

    def make_schedule(self):
        self.trainer, self.meter = Trainer(self.model, self.optimizer), Meter(self.optimizer)

    def after_pass(self):
        self.trainer.step()
        self.meter.update()


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.num_passes = model, optimizer, 0

    def step(self):
        self.num_passes += 1


class Meter:
    def __init__(self, optimizer):
        self.optimizer, self.total = optimizer, 0.0

    def update(self):
        self.total += self.optimizer.param_groups[0]["lr"]


class FromStep(Loop):
    """Sets what follows the step's number."""

    def in_pass(self):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (self.step + 1)


class ForPass(Loop):
    """Sets a learning rate for an inner loop, and restores it."""

    def in_pass(self):
        self.num_passes += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.num_passes

    def after_pass(self):
        self.optimizer.param_groups[0]["lr"] = 0.1


class Unlike(Loop):
    """Notes in odd places, some NaN; and a schedule whose optimizer is made later."""

    def make_schedule(self):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer)
        schedule.best = math.nan
        self.later = torch.optim.lr_scheduler.LRScheduler.__new__(torch.optim.lr_scheduler.LRScheduler)
        self.later.optimizer = None
        self.optimizer.param_groups[0] |= {7: 1.0, "": 2.0, "last loss": 0.0}
        return schedule

    def after_pass(self):
        self.optimizer.param_groups[0]["last loss"] += 1


class InnerLoop(Loop):
    """An optimizer of other parameters, which each pass resets, and leaves at a value of its tower."""

    def make_schedule(self):
        self.other = torch.optim.SGD([torch.zeros(3, requires_grad=True)], 0.1)

    def in_pass(self):
        self.num_passes += 1
        self.other.param_groups[0]["lr"] = 0.1 / self.num_passes


@pytest.mark.sampled(50)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("num_workers", [3, 1, 2])
@pytest.mark.parametrize(
    ("program", "named"),
    [
        (AfterPass, "lr of SGD"),
        (InPass, "lr of SGD"),
        (ByHand, "lr of SGD"),
        (NotYet, "last_epoch of StepLR"),
        (Nested, "lr of SGD"),
        (Momentum, "lr of SGD"),
        (InTensor, "lr of SGD"),
        (InNumPy, "lr of SGD"),
        (Waiting, "last_epoch of StepLR"),
        (Betas, "betas of AdamW"),
        (InOnePass, "lr of SGD"),
        (OfItsOwn, "num_calls of Rarely"),
    ],
)
def test_a_setting_that_a_later_pass_changes_ends_the_step_on_all_workers(program, named, num_workers):
    outcomes = simulate(program, num_workers, num_workers)
    for outcome in outcomes:
        assert isinstance(outcome.error, UsageError), outcome
        assert f"changed {named} after the worker's first pass, so its value depends" in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("program", [Loop, FromStep, ForPass, Unlike, InnerLoop, Logged])
def test_what_follows_the_step_is_no_error(program):
    found = {digest for number in (1, 3) for digest in values(lambda job: program(job).digest, number)}
    assert len(found) == 1


def step_of(loss):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return samestep.Step(Towers(model, NUM_TOWERS), loss, optimizer, scheduler=schedule)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_the_loss_reaches_through_a_step_is_found():
    def loss(model, batch):
        step.scheduler.step()
        return loss_of(model, batch)

    step = step_of(loss)
    with pytest.raises(UsageError, match="tower 1 changed last_epoch of StepLR"):
        step(batch_of(0, 21))


def test_a_loop_may_end_with_average_and_what_follows_it():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    towers = Towers(model, NUM_TOWERS)
    for tower in towers(batch_of(0, 21)):
        tower.backward(loss_of(model, tower.batch))
        if tower.index == NUM_TOWERS - 1:
            towers.average()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
