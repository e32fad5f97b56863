"""Passes that compute with the whole batch instead of their tower's rows: a warning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .cases import mostly_long
from .nets import batch_of
from .test_flow import Program
from .test_row_losses import told_of

pytestmark = pytest.mark.sampled

WHOLE = "has read the whole batch and none of its own rows"


class OfAll(Program):
    """The loop's batch, as in other training loops."""

    def batch(self, step):
        self.all = super().batch(step)
        return self.all

    def loss(self, x, y):
        return F.cross_entropy(self.model(self.all["x"]), self.all["y"])


class WithDropout(OfAll):
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))


class OfAPart(OfAll):
    """A batch that is a part of a larger tensor."""

    def batch(self, step):
        whole = batch_of(step, 30)
        self.all = {name: tensor[4:25] for name, tensor in whole.items()}
        return self.all


@pytest.mark.parametrize("num_workers", mostly_long([2, 3, 1], 1))
@pytest.mark.parametrize("program", [OfAll, WithDropout, OfAPart])
def test_a_pass_that_reads_only_the_whole_batch_is_told_of_once_on_each_worker(program, num_workers):
    told = told_of(program, num_workers, WHOLE)
    assert len(told) == num_workers
    assert all("take the rows from tower.batch" in each for each in told)


class LessItsMean(OfAll):
    """Uses both."""

    def loss(self, x, y):
        return F.cross_entropy(self.model(x - self.all["x"].mean(0)), y)


class OfLabelsAlone(OfAll):
    def loss(self, x, y):
        return (
            F.cross_entropy(self.model(torch.ones(len(y), 6)), y) * len(self.all["x"]) / self.all["x"].size(0)
        )


class OfOneTower(OfAll):
    num_towers = 1


class ByPython(OfAll):
    """Looks rows up in a table, by numbers that it has read."""

    def loss(self, x, y):
        labels = torch.tensor(y.tolist())
        return F.cross_entropy(self.model(self.all["x"][: len(labels)]), labels)

    def batch(self, step):
        return super().batch(step) | {"names": [*"abcdefghijklmnopqrstu"][: 21 - step % 3]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "most"), [(LessItsMean, 3), (OfLabelsAlone, 3), (OfOneTower, 1), (ByPython, 2)]
)
def test_other_reads_of_the_batch_are_not_told_of(program, most):
    for num_workers in range(1, most + 1):
        assert not told_of(program, num_workers, WHOLE)
