"""Plain numbers on layers: what passes count there is told, and what one worker alone sets is refused."""

import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import DisagreementError

from .cases import mostly_long
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

NUM_TOWERS = 6


class Counting(nn.Linear):
    """Anneals by the number of calls."""

    def __init__(self):
        super().__init__(4, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * math.exp(-self.calls / 10)


class Averaging(nn.Linear):
    """Takes off a running mean, as a number."""

    def __init__(self):
        super().__init__(4, 3)
        self.mean = 0.0

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return super().forward(x - self.mean)


class AveragingInNumPy(nn.Linear):
    """The same for each feature."""

    def __init__(self):
        super().__init__(4, 3)
        self.mean = np.zeros(4, np.float32)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).numpy()
        return super().forward(x - torch.from_numpy(self.mean))


class Seen(nn.Linear):
    """Counts examples, which nothing but the loss of another step could depend on."""

    def __init__(self):
        super().__init__(4, 3)
        self.num_seen = np.int64(0)

    def forward(self, x):
        self.num_seen += len(x)
        return super().forward(x)


class Noting(nn.Linear):
    """Notes what all passes of a step have alike."""

    def __init__(self):
        super().__init__(4, 3)
        self.has_run, self.width, self.progress, self.nothing = False, 0, 0.0, math.nan

    def forward(self, x):
        self.has_run, self.width, self.nothing = True, x.shape[1], float("nan")
        return super().forward(x)


class ForTheLog(nn.Linear):
    """Notes numbers of each pass."""

    def __init__(self):
        super().__init__(4, 3)
        self.scale = self.total = self.last = 0.0

    def forward(self, x):
        self.scale = x.abs().max().item()
        self.total = 0.0
        for row in x:
            self.total += row.mean().item()
        y = super().forward(x / self.scale) * self.total
        self.last = y.mean().item()
        return y


class InAnArray(ForTheLog):
    """Of which each pass sets all entries first."""

    def __init__(self):
        super().__init__()
        self.last = np.zeros(2)

    def forward(self, x):
        self.last[0] = 1.0
        self.last[1] = x.mean().item()
        return super(ForTheLog, self).forward(x) * (self.last[0] + self.last[1])


class InAPartOfAnArray(InAnArray):
    def forward(self, x):
        outputs = super(ForTheLog, self).forward(x) * (1 + self.last[1])
        self.last[0] = x.mean().item()
        self.last[1] += self.last[0]
        return outputs


class OfTheLast(ForTheLog):
    """Uses the number that the pass before has noted."""

    def forward(self, x):
        return super().forward(x * (1 + self.last))


class Dropping(nn.Dropout):
    """Sets what the class of torch reads, after it has read it."""

    def forward(self, x):
        y = super().forward(x)
        self.p = 0.5 * y.square().mean().sigmoid().item()
        return y


class Margin(nn.Module):
    """A loss that gets harder with each call."""

    def __init__(self):
        super().__init__()
        self.iteration = 0

    def forward(self, y):
        self.iteration += 1
        return y.square().mean() * self.iteration


def square(y):
    return y.square().mean()


def train(job, make, loss=square, edit=lambda job, model, step: None, num_steps=3):
    torch.manual_seed(0)
    model = make(job)
    towers = Towers(model, NUM_TOWERS, job=job)
    for step in range(num_steps):
        edit(job, model, step)
        for tower in towers(torch.randn(12, 4, generator=torch.Generator().manual_seed(step))):
            tower.backward(loss(model(tower.batch)))
        towers.average()
        torch.optim.SGD(model.parameters(), 0.1).step()
    return samestep.digest(model)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1, 2])
@pytest.mark.parametrize(
    ("make", "make_loss", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), Dropping()), lambda: square, r"p of 1 \(Dropping\)"),
        (AveragingInNumPy, lambda: square, "mean of AveragingInNumPy"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Counting()), lambda: square, r"calls of 1 \(Counting\)"),
        (lambda: nn.Linear(4, 3), Margin, "iteration of Margin"),
        (Counting, lambda: square, "calls of Counting"),
        (Averaging, lambda: square, "mean of Averaging"),
        (Seen, lambda: square, "num_seen of Seen"),
        (OfTheLast, lambda: square, "last of OfTheLast"),
    ],
)
def test_what_two_passes_change_is_told_once_on_each_worker(make, make_loss, named, num_workers):
    with pytest.warns(UserWarning, match=f"^passes changed {named}: a tower's pass starts from") as told:
        values(lambda job: train(job, lambda _: make(), make_loss(), num_steps=33), num_workers)
    assert len(told) == num_workers


@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
def test_two_losses_of_a_kind_are_told_apart(num_workers):
    def work(job):
        one, other = Margin(), Margin()
        other.iteration = 7
        heads = iter([one, other] * 50)
        return train(job, lambda _: nn.Linear(4, 3), lambda y: next(heads)(y), num_steps=1)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        values(work, num_workers)
    named = [each for each in told if "iteration of Margin" in str(each.message)]
    assert len(named) == {1: 2, 2: 2, 3: 0}[num_workers]  # where a loss has counted twice on a worker


@pytest.mark.long
def test_losses_that_are_made_in_each_pass_count_for_themselves():
    """Also where one is made where another one lay."""
    model, criterion = nn.Linear(4, 3), None
    towers = Towers(model, 64)
    for tower in towers(torch.ones(128, 4)):
        criterion = None
        criterion = Margin()
        tower.backward(criterion(model(tower.batch)))
    towers.average()
    assert criterion.iteration == 1


def test_a_count_that_the_loop_advances_after_backward_is_told():
    model = Noting()

    def take_step():
        towers = Towers(model, NUM_TOWERS)
        for tower in towers(torch.ones(12, 4)):
            tower.backward(square(model(tower.batch)))
            model.progress += 1
        towers.average()

    with pytest.warns(UserWarning, match="^passes changed progress of Noting"):
        take_step()


def progress(job, model, step):
    model.progress = step / 100


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [5, 1, 2, 3])
def test_sizes_flags_and_what_follows_the_steps_are_let_through(num_workers):
    found = values(lambda job: train(job, lambda _: Noting(), edit=progress, num_steps=33), num_workers)
    assert len(set(found)) == 1


@pytest.mark.parametrize("make", [ForTheLog, InAnArray, lambda: nn.Sequential(nn.Linear(4, 4), ForTheLog())])
def test_what_each_pass_sets_anew_is_let_through(make):
    found = {value for num in (1, 2, 3) for value in values(lambda job: train(job, lambda _: make()), num)}
    assert len(found) == 1


def test_an_entry_that_a_pass_reads_first_is_told():
    with pytest.warns(UserWarning, match="^passes changed last of InAPartOfAnArray"):
        values(lambda job: train(job, lambda _: InAPartOfAnArray()), 1)


def test_what_the_loop_reads_first_is_told():
    def work(job):
        torch.manual_seed(0)
        model = ForTheLog()
        towers = Towers(model, NUM_TOWERS, job=job)
        for tower in towers(torch.randn(12, 4)):
            tower.backward(square(model(tower.batch * (1 + model.last))))
        towers.average()

    with pytest.warns(UserWarning, match="^passes changed last of ForTheLog"):
        values(work, 2)


def test_a_layer_may_be_told_which_tower_it_is():
    def work(job):
        model = Noting()
        towers = Towers(model, NUM_TOWERS, job=job)
        for tower in towers(torch.ones(12, 4)):
            model.index = tower.index
            tower.backward(square(model(tower.batch)))
        towers.average()

    for num_workers in (1, 2, 3):
        values(work, num_workers)


def dropout(p):
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(p))


def on_all(job, model, step):
    model[1].p = 0.01 * step


def on_one(job, model, step):
    if step == 7 and job.rank == 1:
        model[1].p = 0.5


@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_layers_that_are_set_to_other_values_are_refused_at_the_start(num_workers):
    outcomes = simulate(lambda job: train(job, lambda job: dropout(0.2 if job.rank else 0.1)), num_workers)
    for outcome in outcomes:
        assert isinstance(outcome.error, DisagreementError)
        assert "has the layer 1 (Dropout) = p=0." in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 2])
def test_what_one_worker_sets_a_layer_to_is_found_within_32_steps(num_workers):
    outcomes = simulate(
        lambda job: train(job, lambda _: dropout(0.1), edit=on_one, num_steps=33), num_workers
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, DisagreementError)
        assert "step 32: " in outcome.text
        assert "worker 1 has the layer 1 (Dropout) = p=0.5, inplace=False" in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 2])
def test_what_all_workers_set_alike_is_let_through(num_workers):
    work = lambda job: train(job, lambda _: dropout(0.1), edit=on_all, num_steps=33)  # noqa: E731
    assert len({found for number in (1, num_workers) for found in values(work, number)}) == 1


@pytest.mark.long
def test_functions_among_a_layers_settings_are_not_compared():
    # As in the `qconfig` that torch's quantisation sets: each process has them elsewhere.
    def make(_):
        model = dropout(0.1)
        model[0].qconfig = (functools.partial(lambda: None), ("fbgemm", 8))
        return model

    assert (
        len({found for num_workers in (1, 2) for found in values(lambda job: train(job, make), num_workers)})
        == 1
    )
