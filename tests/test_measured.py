"""Metrics of an evaluation that depend on which batches a worker measures: a warning."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep import Evaluation

from .cases import mostly_long
from .nets import batch_of, net
from .simulation import simulate
from .test_pass_operators import warnings_of

pytestmark = pytest.mark.sampled(5)

WORKERS = mostly_long([1, 2, 3], 2)
DATA = TensorDataset(*batch_of(0, 37).values())
OTHERS = DataLoader(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), batch_size=5)


class Measured:
    """A program that evaluates once; by default each batch for itself."""

    metrics = None

    def __init__(self, job):
        self.job, self.model = job, net()
        self.prepare()
        found = Evaluation(DATA, self.measure, metrics=self.metrics, rows=5)(self.model, job)
        self.digest = tuple(found.values())

    def prepare(self):
        pass

    def measure(self, model, batch):
        x, y = batch
        total = F.cross_entropy(model(x), y, reduction="sum").item()
        return {"loss": (self.changed(total), len(y))}

    def changed(self, total):
        return total


# ---- wrong -----------------------------------------------------------------------------------------


class RunningMean(Measured):
    def prepare(self):
        self.mean = 0.0

    def changed(self, total):
        self.mean = 0.9 * self.mean + 0.1 * total
        return self.mean


class InADict(Measured):
    def prepare(self):
        self.state = {}

    def changed(self, total):
        self.state["sum"] = self.state.get("sum", 0.0) + total
        return self.state["sum"]


class ByACount(Measured):
    def prepare(self):
        self.calls = itertools.count(1)

    def changed(self, total):
        return total / next(self.calls)


class OtherRows(Measured):
    def prepare(self):
        self.others = itertools.cycle(OTHERS)

    def changed(self, total):
        return total + self.model(next(self.others)).sum().item()


class Meter:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    def mean(self):
        return sum(self.values) / len(self.values)


class GoingOn(Measured):
    """A metric of all batches so far, as if they were all."""

    def prepare(self):
        self.meter = Meter()

    def changed(self, total):
        self.meter.update(total)
        return self.meter.mean()


class OfTheFirstBatch(Measured):
    """What looks like a cache, but depends on which batch fills it."""

    def prepare(self):
        self.center = None

    def measure(self, model, batch):
        x, y = batch
        if self.center is None:
            self.center = x.mean(0)
        return {"loss": (model(x - self.center).sum().item(), len(y))}


class OfTheFirstTotal(Measured):
    def prepare(self):
        self.state = {}

    def changed(self, total):
        if "first" not in self.state:
            self.state["first"] = total
        return total / self.state["first"]


class MeanOfTheFirstBatch(OfTheFirstBatch):
    """In a tensor that has the form of the first batch, too."""

    def measure(self, model, batch):
        x, y = batch
        if self.center is None:
            self.center = torch.full_like(x[0], x.mean().item())
        return {"loss": (model(x - self.center).sum().item(), len(y))}


class LabelsThatComeFirst(Measured):
    def measure(self, model, batch):
        x, y = batch
        if not hasattr(self, "classes"):
            self.classes = sorted(set(y.tolist()))
        return {"loss": (model(x)[:, self.classes].sum().item(), len(y))}


class ByRank(Measured):
    def changed(self, total):
        return total * (1 + self.job.rank)


class PerWorker(Measured):
    def metrics(self, totals):
        return {"loss": totals["loss"][0] / self.job.world_size}


WRONG = {
    RunningMean: "mean of self",
    InADict: "sum of state of self",
    ByACount: "calls of self",
    OtherRows: "others of self",
    GoingOn: "values of meter",
    OfTheFirstBatch: "center of self",
    MeanOfTheFirstBatch: "center of self",
    OfTheFirstTotal: "first of state of self",
    LabelsThatComeFirst: "classes of self",
    ByRank: "the worker's rank",
    PerWorker: "the number of workers",
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", WRONG)
def test_it_is_named(program, num_workers):
    told, _ = warnings_of(program, num_workers)
    (message,) = told  # worker 0's
    assert f"metrics depend on {WRONG[program]}" in message


# ---- right -----------------------------------------------------------------------------------------


class ForTheLog(Measured):
    """What it keeps has no part in the result."""

    def prepare(self):
        self.shown, self.num_batches, self.cache, self.best = [], 0, None, 9.0

    def changed(self, total):
        self.num_batches += 1
        self.best = min(self.best, total)
        if len(self.shown) < 3:
            self.shown.append(total)
        if self.cache is None:
            self.cache = 2.0
        if self.job.rank == 0 and self.job.world_size > 1:
            self.last = f"{self.num_batches}: {total}"
        return total * self.cache


class BestSoFar(Measured):
    """All workers have the same totals."""

    best = 9.0

    def metrics(self, totals):
        total, count = totals["loss"]
        self.best = min(self.best, float(total / count))
        return {"best": self.best}


class MeterOfTheBatch(GoingOn):
    def changed(self, total):
        self.meter.values.clear()
        return super().changed(total)


class Counting(Measured):
    """Buffers are restored before each batch."""

    def prepare(self):
        self.model.register_buffer("seen", torch.zeros(()))

    def changed(self, total):
        self.model.seen = self.model.seen + 1
        return total + self.model.seen.item()


class OfTheFormOfABatch(Measured):
    """What it fills a cache with is the same for each batch."""

    def prepare(self):
        self.positions = self.zeros = self.scale = None

    def measure(self, model, batch):
        x, y = batch
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.size(-1), device=x.device).to(x)
        if self.zeros is None:
            self.zeros, self.scale = torch.full_like(x[0], 0.0), x.new_ones(x.ndim)
        total = model(x + self.positions * self.scale[0] + self.zeros).sum()
        return {"loss": (total.item(), len(y))}


class ByTheBatch(Measured):
    """A cache with an entry of its own for each batch."""

    def prepare(self):
        self.outputs = {}

    def measure(self, model, batch):
        x, y = batch
        labels = tuple(y.tolist())
        if labels not in self.outputs:
            self.outputs[labels] = model(x)
        return {"loss": (self.outputs[labels].sum().item(), len(y))}


RIGHT = [*(Measured, ForTheLog, BestSoFar, MeterOfTheBatch, Counting), OfTheFormOfABatch, ByTheBatch]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", RIGHT)
def test_what_is_computed_of_each_batch_is_not(program, num_workers):
    told, digests = warnings_of(program, num_workers)
    assert (told, digests) == ([], warnings_of(program, 1)[1])


def test_it_is_told_once():
    def work(job):
        calls = itertools.count(1)
        evaluation = Evaluation(DATA, lambda model, batch: {"mean": (next(calls), 1)}, rows=5)
        return [evaluation(net(), job) for _ in range(2)]

    with pytest.warns(UserWarning, match="metrics depend on calls") as caught:
        simulate(work, 1)
    assert len(caught) == 1
