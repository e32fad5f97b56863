"""`Towers.gather`: what all towers have kept, in order, on every worker."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import UsageError

from .nets import batch_of, net
from .simulation import simulate, values

NUM_TOWERS = 7


def center_of_all(job):
    """Train with a running mean of all towers' outputs; return the digest of weights and mean."""
    model, center = net(), torch.zeros(3)
    towers = Towers(model, NUM_TOWERS, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        kept = {}
        for tower in towers(batch_of(step, 5 if step == 1 else 19)):  # two towers without rows
            z = model(tower.batch["x"])
            kept[tower.index] = {"mean": z.detach().mean(0), "rows": tower.rows}
            tower.backward(F.cross_entropy(z - center, tower.batch["y"]))
        report = towers.average()
        optimizer.step()
        found = towers.gather(kept)
        assert sum(each["rows"] for each in found) == report.rows
        center = 0.9 * center + 0.1 * torch.stack([each["mean"] for each in found]).mean(0)
    return samestep.digest(model), center.tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_what_is_computed_of_all_towers_has_the_same_bits_on_any_number_of_workers(num_workers):
    assert values(center_of_all, num_workers) == values(center_of_all, 1) * num_workers


def accuracy_of_steps(job):
    model, right = net(), []

    def loss(model, batch):
        z = model(batch["x"])
        right.append((z.argmax(1) == batch["y"]).sum().item())
        return F.cross_entropy(z, batch["y"])

    towers = Towers(model, NUM_TOWERS, job=job)
    step = samestep.Step(towers, loss, torch.optim.SGD(model.parameters(), 0.1))
    accuracies = []
    for index in range(3):
        report = step(batch_of(index, 19))
        accuracies.append(sum(towers.gather(right)) / report.rows)
        right.clear()
    return accuracies


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 7])
def test_the_loss_function_of_a_step_may_keep_values_in_a_list(num_workers):
    assert values(accuracy_of_steps, num_workers) == values(accuracy_of_steps, 1) * num_workers


def step_of(job, keep):
    model = net()
    towers = Towers(model, NUM_TOWERS, job=job)
    kept = {}
    for tower in towers(batch_of(0, 19)):
        kept[tower.index] = tower.batch["x"]
        tower.backward(F.cross_entropy(model(tower.batch["x"]), tower.batch["y"]))
    towers.average()
    return towers.gather(keep(job, kept))


EXPECTED = "expected one for each of its towers [3, 4], in a dict by tower.index, or in order in a list"
WRONG = {
    f"has values for [4]: {EXPECTED}": {4: 1.0},
    f"has 1 values: {EXPECTED}": [1.0],
    f"has a Tensor of values: {EXPECTED}": torch.ones(2),
    "has a value that cannot be pickled (": {3: 1, 4: lambda: None},
}


@pytest.mark.parametrize("what", WRONG)
def test_values_that_are_wrong_on_one_worker_are_named_on_all(what):
    outcomes = simulate(lambda job: step_of(job, lambda job, kept: WRONG[what] if job.rank == 1 else kept), 3)
    for outcome in outcomes:
        assert outcome.text.startswith(f"UsageError: step 0, gather(): worker 1 {what}")


def test_all_get_copies():
    kept = {}
    (found, *_) = step_of(samestep.init("cpu"), lambda job, values: kept.update(values) or values)
    assert torch.equal(found, kept[0])
    assert found.data_ptr() != kept[0].data_ptr()


def test_without_a_step_it_is_refused():
    towers = Towers(nn.Linear(2, 1), 2)
    with pytest.raises(UsageError, match=r"gather\(\) without a step: call it after average\(\)"):
        towers.gather({})
    next(towers(torch.ones(2, 2)))
    with pytest.raises(UsageError, match=r"cannot gather in step 0: call average\(\), or abandon\(\), first"):
        towers.gather({})
