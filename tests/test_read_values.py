"""Values that Python reads from a tensor of an earlier pass, and that decide about a loss: a warning."""

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F

import samestep
from samestep import Step

from .cases import mostly_long
from .nets import batch_of, net
from .test_flow import Program
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 1)


class Reading(Program):
    """Keeps the last pass's loss, as a tensor, and reads it for the loss of the next one."""

    def build(self):
        self.kept = torch.zeros(())
        return net()

    def loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        weighted = self.weighted(loss, x)
        self.keep(loss.detach())
        return weighted

    def weighted(self, loss, x):
        return loss * (1 + 0.1 * float(self.kept))

    def keep(self, value):
        self.kept = value


# ---- wrong -----------------------------------------------------------------------------------------


class Deciding(Reading):
    def weighted(self, loss, x):
        if self.kept > 0.5:
            loss = loss + self.model(x).square().mean()
        return loss


class Rolling(Reading):
    def loss(self, x, y):
        return super().loss(x.roll(int(10 * self.kept), 1), y)


class InAList(Reading):
    def build(self):
        self.history = [0.0]
        return net()

    def weighted(self, loss, x):
        return loss / (1 + float(self.history[-1]))

    def keep(self, value):
        self.history.append(value)


class InADeque(InAList):
    def build(self):
        self.history = collections.deque([torch.ones(())], maxlen=3)
        return net()

    def weighted(self, loss, x):
        return loss * torch.tensor([1.0, float(sum(self.history))]).sum()


class OfALayer(Reading):
    def weighted(self, loss, x):
        return loss * (1 + float(getattr(self.model[1], "kept", 0.0)))

    def keep(self, value):
        self.model[1].kept = value


class InPlace(Reading):
    """Filled with numbers, which no operator shows to be from the rows."""

    def keep(self, value):
        self.kept.copy_(torch.tensor(0.9 * self.kept.item() + 0.1 * value.item()))


@dataclasses.dataclass(frozen=True)
class State:
    mean: object


class InAReplacedObject(Reading):
    def build(self):
        self.state = State(torch.zeros(()))
        return net()

    def weighted(self, loss, x):
        return loss * F.softplus(torch.tensor(round(float(self.state.mean), 4)))

    def keep(self, value):
        self.state = dataclasses.replace(self.state, mean=value)


class OfAStep(Reading):
    def __init__(self, job):
        torch.manual_seed(0)
        model = self.model = self.build()
        self.history = [torch.zeros(())]
        towers = samestep.Towers(model, 7, job=job)
        step = Step(towers, self.loss_of, torch.optim.SGD(model.parameters(), 0.1))
        for number in range(2):
            step(batch_of(number, 21))
        self.digest = samestep.digest(model)

    def loss_of(self, model, batch):
        return self.loss(batch["x"], batch["y"])

    def weighted(self, loss, x):
        return loss * (1 + float(self.history[-1]))

    def keep(self, value):
        self.history.append(value)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "program",
    [Reading, Deciding, Rolling, InAList, InADeque, OfALayer, InPlace, InAReplacedObject, OfAStep],
)
def test_a_loss_that_follows_from_them_is_told_of_once_on_each_worker(program, num_workers):
    told, _ = warnings_of(program, num_workers)
    found = [each for each in told if "which each pass computes from what the one before has left" in each]
    assert len(found) == num_workers
    assert len({digest for workers in (1, 2, 3) for digest in warnings_of(program, workers)[1]}) == 3


# ---- right -----------------------------------------------------------------------------------------


class ForTheLog(Reading):
    """What is read decides about nothing but a line of a log."""

    def weighted(self, loss, x):
        self.mean = float(self.kept)
        if self.kept > 0.5:
            self.line = f"loss {self.mean:.3f}"
        return loss


class NotRun(Reading):
    """Code that would carry it on does not run."""

    carries = False

    def keep(self, value):
        if self.carries:
            self.kept = value


class Anew(Reading):
    def weighted(self, loss, x):
        self.kept = torch.ones(())
        return super().weighted(loss, x)


class ByTower(Reading):
    """One for each tower, which takes the next step with it."""

    def run(self, tower):
        self.index = tower.index
        super().run(tower)

    def build(self):
        self.kept = collections.defaultdict(lambda: torch.zeros(()))
        return net()

    def weighted(self, loss, x):
        return loss * (1 + 0.1 * float(self.kept[self.index]))

    def keep(self, value):
        self.kept[self.index] = value


class Cached(Reading):
    """A constant that is computed when it is first needed."""

    def build(self):
        self.scale = None
        return net()

    def weighted(self, loss, x):
        if self.scale is None:
            self.scale = torch.linspace(0, 1, 5).mean()
        return loss * float(self.scale)

    def keep(self, value):
        pass


class OfAParameter(Cached):
    def weighted(self, loss, x):
        return loss * (1 + float(self.model[0].bias[0].detach()))


class UntilItConverges(Cached):
    def weighted(self, loss, x):
        size, step = torch.ones(()), 0
        while size > 0.1 and step < 9:
            size, step = size / 2, step + 1
        return loss * float(size)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "program", [ForTheLog, NotRun, Anew, ByTower, Cached, OfAParameter, UntilItConverges]
)
def test_other_values_are_not(program, num_workers):
    assert warnings_of(program, num_workers)[0] == []
    assert len({digest for workers in (1, 2, 3) for digest in warnings_of(program, workers)[1]}) == 1
