"""Losses that passes decide by numbers that they carry on: a warning, long before these decide otherwise."""

import pytest
import torch
import torch.nn.functional as F

from samestep import Step, Towers

from .nets import batch_of, net
from .test_flow import Program
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled

DECIDED = "a pass decides on its loss by "


class Decides(Program):
    """By a count of passes."""

    def build(self):
        self.count, self.kept, self.counts = 0, [], {"passes": 0}
        self.dropout = torch.nn.Dropout(0.0)
        return net()

    def loss(self, x, y):
        self.x, self.outputs = x, self.model(x)
        return self.decided(F.cross_entropy(self.outputs, y))

    def decided(self, loss):
        return loss


class ByAThreshold(Decides):
    def decided(self, loss):
        self.count += 1
        if self.count > 1000:
            loss = loss + self.outputs.square().mean()
        return loss


class ByAnEarlyReturn(Decides):
    def decided(self, loss):
        self.count += len(self.outputs)
        if self.count < 10_000:
            return loss
        return loss * 2


class ByAnExpression(Decides):
    def decided(self, loss):
        self.count = self.count + 1
        return loss * 2 if self.count > 1000 else loss


class ByAWeight(Decides):
    def decided(self, loss):
        self.count += 1
        weight = 1.0 if self.count > 1000 else 0.0
        return loss + weight * self.outputs.square().mean()


class ByAnIndex(Decides):
    def decided(self, loss):
        self.count += 1
        return [loss, loss * 2][self.count > 1000]


class ByRounding(Decides):
    def decided(self, loss):
        self.count += 1
        return loss * 0.5 ** (self.count // 1000)


class ByAMaximum(Decides):
    def decided(self, loss):
        self.count += 1
        return loss + max(0, self.count - 1000) * self.outputs.square().mean()


class ByALength(Decides):
    def decided(self, loss):
        self.kept.append(loss.item())
        if len(self.kept) > 1000:
            loss = loss * 2
        return loss


class ByASum(Decides):
    def decided(self, loss):
        self.kept.append(loss.item())
        return loss * 2 if sum(self.kept) > 1000 else loss


class ByAnEntry(Decides):
    def decided(self, loss):
        self.counts["passes"] += 1
        return loss * 2 if self.counts["passes"] > 1000 else loss


class BySetters(Decides):
    def read(self):
        return self.count

    def write(self, count):
        self.count = count

    def decided(self, loss):
        self.write(self.read() + 1)
        return loss * 2 if self.read() > 1000 else loss


class ByAMethod(Decides):
    """Which has branches of its own."""

    def is_late(self):
        late = False
        if self.count > 1000:
            late = True
        return late

    def decided(self, loss):
        self.count += 1
        if self.is_late():
            loss = loss * 2
        return loss


class ByCases(Decides):
    def decided(self, loss):
        self.count += 1
        match self.count // 1000:
            case 0:
                return loss
            case _:
                return loss * 2


class ByASetting(Decides):
    """A layer of torch's."""

    def decided(self, loss):
        self.count += 1
        if self.count > 1000:
            self.dropout.p = 0.5
        return loss


class InALibrary(Decides):
    """A checkpoint, for example."""

    def build(self):
        outer = self

        class Counting(torch.nn.Linear):
            def forward(self, x):
                outer.count += 1
                return super().forward(x * 2 if outer.count > 1000 else x)

        super().build()
        return Counting(6, 3)

    def loss(self, x, y):
        parameters = dict(self.model.named_parameters())
        return F.cross_entropy(torch.func.functional_call(self.model, parameters, (x[:, :6],)), y)


class OnlySomePasses(Decides):
    """Which have a loss at all."""

    def run(self, tower):
        self.count += 1
        loss = super().loss(tower.batch["x"], tower.batch["y"])
        if self.count < 1000:
            tower.backward(loss)
        else:
            tower.backward(loss * 0)


class InAStep(Decides):
    """Whose loss is a function of its own."""

    def __init__(self, job):
        torch.manual_seed(0)
        count = 0

        def loss(model, batch):
            nonlocal count
            count += 1
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            return loss * 2 if count > 1000 else loss

        towers = Towers(net(), 7, job=job)
        step = Step(towers, loss, torch.optim.SGD(towers.model.parameters(), 0.1))
        for number in range(2):
            step(batch_of(number, 21))
        self.digest = ""


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 1, 2, 7])
@pytest.mark.parametrize(
    "program",
    [
        *(ByAThreshold, ByAnEarlyReturn, ByAnExpression, ByAWeight, ByAnIndex, ByRounding, ByAMaximum),
        *(ByALength, ByASum, ByAnEntry, BySetters, ByAMethod, ByCases, ByASetting),
        *(InALibrary, OnlySomePasses, InAStep),
    ],
)
def test_it_is_told_of_once(program, num_workers):
    told, _ = warnings_of(program, num_workers)
    assert len([each for each in told if DECIDED in each]) == 1, told
    assert "test_carried_decisions.py, line " in told[0]


# ---- what does not depend on other passes --------------------------------------------------------------


class ForALog(Decides):
    def decided(self, loss):
        self.count += 1
        if self.count % 100 == 0:
            print(loss.item())
        return loss


class SwitchedOff(Decides):
    """As features of a program may be."""

    counts_passes = False

    def decided(self, loss):
        if self.counts_passes:
            self.count += 1
        return loss * 2 if self.count > 1000 else loss


class PutBack(Decides):
    """The depth of nested calls, and a queue that is emptied again."""

    def decided(self, loss):
        self.count += 1
        self.kept.append(self.x)
        x = self.kept.pop()
        loss = loss + self.model(x).square().mean()
        self.count -= 1
        return loss * 2 if self.count > 0 or len(self.kept) > 0 else loss


class ForABest(Decides):
    def decided(self, loss):
        self.best = min(getattr(self, "best", 1000.0), loss.item())
        return loss


class ForAnError(Decides):
    def decided(self, loss):
        self.count += loss.item()
        if self.count != self.count:
            raise ValueError("the loss is not finite")
        return loss


class SetAnew(Decides):
    def decided(self, loss):
        self.count = len(self.outputs)
        self.count += 1
        return loss * 2 if self.count > 1000 else loss


class InALoop(Decides):
    def decided(self, loss):
        count = 0
        while count < 3:
            loss = loss + self.outputs.square().mean()
            count += 1
        return loss


class Cached(Decides):
    def decided(self, loss):
        rows = len(self.outputs)
        if rows not in self.counts:
            self.counts[rows] = torch.ones(rows, 3)
        return loss + (self.outputs * self.counts[rows]).mean()


class Growing(Decides):
    """A cache, as of rotary embeddings."""

    def decided(self, loss):
        if not self.kept or len(self.outputs) > len(self.kept[0]):
            self.kept = [torch.ones(2 * len(self.outputs), 3)]
        return loss + (self.outputs * self.kept[0][: len(self.outputs)]).mean()


class ByRows(Decides):
    def decided(self, loss):
        self.count = int(self.x[0, 0] > 0)
        return loss * 2 if self.count > 0 else loss


class ByALocalVariable(Decides):
    """Of a function that is called, where one branch sets it."""

    def weight(self):
        if self.model.training:
            double = 2
            factor = double
        else:
            factor = 1
        return double * factor

    def decided(self, loss):
        return loss * 2 if self.weight() > 1 else loss


class Kind:
    """Of arrays; an object without data of its own."""

    def __init__(self):
        self.library = torch

    def fits(self, found):
        return isinstance(found, self.library.Tensor)


class OfTorch(Kind):
    name = "torch"


_KINDS = {}


def _kind_of(found):
    known = list(_KINDS.items())
    for _, kind in known:
        if kind.fits(found):
            return kind
    names = [name for name, _ in known]
    for subclass in Kind.__subclasses__():
        if subclass.name not in names:
            kind = subclass()
            _KINDS[kind.name] = kind
            if kind.fits(found):
                return kind
    return None


class ByAKind(Decides):
    """Of an input, as libraries do that are for several kinds of arrays."""

    def decided(self, loss):
        if _kind_of(loss).fits(loss):
            return loss * 2 if _kind_of(self.outputs).fits(self.outputs) else loss
        return loss


class ByABuffer(Decides):
    """That has no value; were there one, passes would set it."""

    def build(self):
        model = super().build()
        model.register_buffer("weight", None)
        return model

    def decided(self, loss):
        if self.model.weight is not None:
            if self.model.weight.ndim == 0:
                self.model.weight = self.model.weight.repeat(3)
            if self.model.weight.min() > 1:
                loss = loss * self.model.weight.mean()
        return loss


class BySteps(Decides):
    """What the program counts after `average()`."""

    def batch(self, step):
        self.count += 1
        return super().batch(step)

    def decided(self, loss):
        return loss * 2 if self.count > 1000 else loss


class OfEachTower(Decides):
    def run(self, tower):
        self.counts[tower.index] = self.counts.get(tower.index, 0) + 1
        loss = super().loss(tower.batch["x"], tower.batch["y"])
        tower.backward(loss * 2 if self.counts[tower.index] > 1000 else loss)


class OfOwnGenerator(Decides):
    """That each pass seeds."""

    def run(self, tower):
        self.generator = torch.Generator()
        self.generator.manual_seed(tower.index)
        super().run(tower)

    def decided(self, loss):
        return loss * 2 if torch.rand((), generator=self.generator).item() > 0.5 else loss


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 1, 2])
@pytest.mark.parametrize(
    "program",
    [
        *(
            ForALog,
            SwitchedOff,
            PutBack,
            ForABest,
            ForAnError,
            SetAnew,
            InALoop,
            Cached,
            Growing,
            ByRows,
            ByALocalVariable,
            ByAKind,
            ByABuffer,
            BySteps,
        ),
        *(OfEachTower, OfOwnGenerator),
    ],
)
def test_other_decisions_are_not(program, num_workers):
    assert not [each for each in warnings_of(program, num_workers)[0] if DECIDED in each]
