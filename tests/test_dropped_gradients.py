"""Programs that expect gradients to add up over several averages hear that they do not."""

import pytest
import torch
from torch.optim import SGD

from samestep import Towers

from .nets import batch_of, loss_of, net, run_passes
from .simulation import values

pytestmark = pytest.mark.sampled

WORDS = "lacks gradients that parameters had before step"


def accumulate(model, towers, optimizer):
    for step in range(4):
        run_passes(towers, batch_of(step))
        towers.average()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulate_more_than_are_looked_at(model, towers, optimizer):
    for step in range(20):
        run_passes(towers, batch_of(step))
        towers.average()
    optimizer.step()


def add_a_penalty_before(model, towers, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        model[0].weight.square().sum().backward()
        run_passes(towers, batch_of(step))
        towers.average()
        optimizer.step()


def accumulate_in_two_towers(model, towers, optimizer):
    more = Towers(model, 3, job=towers.job)
    for step in range(2):
        for each in (towers, more):
            run_passes(each, batch_of(step))
            each.average()
        optimizer.step()


ADDING = [accumulate, accumulate_more_than_are_looked_at, add_a_penalty_before, accumulate_in_two_towers]


def train(model, towers, optimizer, *, steps=3, zero=False, **zero_grad):
    for step in range(steps):
        run_passes(towers, batch_of(step))
        towers.average()
        optimizer.step()
        if zero:
            optimizer.zero_grad(**zero_grad)


def leave_zeros(model, towers, optimizer):
    train(model, towers, optimizer, zero=True, set_to_none=False)


def add_a_penalty_after(model, towers, optimizer):
    for step in range(2):
        run_passes(towers, batch_of(step))
        towers.average()
        model[0].weight.square().sum().backward()
        optimizer.step()


def skip_what_is_not_finite(model, towers, optimizer):
    for step in range(4):
        scale = torch.inf if step == 1 else 1.0
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch) * scale)
        if torch.tensor(towers.average().grad_norm).isfinite():
            optimizer.step()


def measure_and_drop(model, towers, optimizer):
    for step in range(3):
        run_passes(towers, batch_of(step))
        towers.average()
    optimizer.zero_grad(set_to_none=False)
    train(model, towers, optimizer)
    for step in range(2):
        run_passes(towers, batch_of(step))
        towers.average()
        optimizer.zero_grad()
    train(model, towers, optimizer)


def measure_only(model, towers, optimizer):
    for step in range(3):
        run_passes(towers, batch_of(step))
        towers.average()


def update_by_hand(model, towers, optimizer):
    for step in range(3):
        run_passes(towers, batch_of(step))
        towers.average()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
    train(model, towers, optimizer)


def climb_first(model, towers, optimizer):
    """As sharpness-aware minimization."""
    for step in range(3):
        run_passes(towers, batch_of(step))
        towers.average()
        steps = [0.05 * parameter.grad for parameter in model.parameters()]
        for parameter, each in zip(model.parameters(), steps, strict=True):
            parameter.data.add_(each)
        run_passes(towers, batch_of(step))
        towers.average()
        for parameter, each in zip(model.parameters(), steps, strict=True):
            parameter.data.sub_(each)
        optimizer.step()


def combine_two_tasks(model, towers, optimizer):
    """As gradient surgery."""
    for step in range(2):
        found = []
        for task in range(2):
            run_passes(towers, batch_of(2 * step + task))
            towers.average()
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, two in zip(model.parameters(), *found, strict=True):
            parameter.grad = one + two
        optimizer.step()


def search_along_a_line(model, towers, optimizer):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        run_passes(towers, batch_of(0))
        return torch.tensor(towers.average().loss)

    for _ in range(2):
        optimizer.step(closure)


def take_turns(model, towers, optimizer):
    head = SGD(model[-1].parameters(), 0.1)
    for step in range(4):
        run_passes(towers, batch_of(step))
        towers.average()
        (head if step % 2 else optimizer).step()


def adversaries(model, towers, optimizer):
    """Two models, of which one's step leaves gradients on the other."""
    critic = torch.nn.Linear(3, 1)
    towers, of_critic = Towers(model, 3, job=towers.job, also=critic), Towers(critic, 3, job=towers.job)
    of_critics = SGD(critic.parameters(), 0.1)
    for step in range(3):
        for tower in of_critic(batch_of(step)):
            tower.backward(critic(model(tower.batch["x"]).detach()).mean())
        of_critic.average()
        of_critics.step()
        for tower in towers(batch_of(step)):
            tower.backward(-critic(model(tower.batch["x"])).mean())
        towers.average()
        optimizer.step()


def train_without_towers_before(model, towers, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch_of(step)).backward()
        optimizer.step()
    train(model, towers, optimizer)
    loss_of(model, batch_of(5)).backward()
    optimizer.step()
    train(model, towers, optimizer)


APART = [
    train,
    leave_zeros,
    add_a_penalty_after,
    skip_what_is_not_finite,
    measure_and_drop,
    measure_only,
    update_by_hand,
    climb_first,
    combine_two_tasks,
    search_along_a_line,
    take_turns,
    adversaries,
    train_without_towers_before,
]


def run(program, job=None):
    torch.manual_seed(0)
    model = net()
    program(model, Towers(model, 5, job=job), SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("program", ADDING)
def test_gradients_that_were_to_be_added_are_named_once(program, recwarn):
    run(program)
    assert [str(each.message).split(":")[0] for each in recwarn] == [f"SGD.step() {WORDS} 1"]


@pytest.mark.parametrize("program", APART)
def test_gradients_that_are_not_wanted_are_dropped_in_silence(program):
    run(program)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_one_of_several_workers_warns(num_workers, recwarn):
    values(lambda job: run(accumulate, job), num_workers)
    assert len([each for each in recwarn if WORDS in str(each.message)]) == 1
