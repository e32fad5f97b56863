"""Numbers outside modules that passes leave to later ones: a warning where losses depend on them."""

import random
import re
import warnings
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import samestep

from .cases import mostly_long
from .simulation import simulate
from .test_flow import Program

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 2)
kept = {"mean": 0.0}


class Baseline(Program):
    """A loss with a baseline, as in reinforcement learning, that each pass updates by a number."""

    steps = 1

    def build(self):
        self.baseline = 0.0
        return super().build()

    def loss(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        loss = self.weighted(losses)
        self.update(losses.mean().item())
        return loss

    def weighted(self, losses):
        return ((losses.detach() - self.baseline) * losses).mean()

    def update(self, mean):
        self.baseline = 0.9 * self.baseline + 0.1 * mean


class AsTensor(Baseline):
    def weighted(self, losses):
        return (losses * torch.tensor(self.baseline)).mean()


class Filled(Baseline):
    def weighted(self, losses):
        return (losses * torch.full_like(losses, -self.baseline)).mean()


class InList(Baseline):
    def build(self):
        self.history = [0.5]
        return super().build()

    def weighted(self, losses):
        return (losses * self.history[-1]).mean()

    def update(self, mean):
        self.history[-1] = mean


class Annealed(Baseline):
    """A temperature that each pass lowers, without reading any tensor."""

    def build(self):
        self.temperature = 1.0
        return super().build()

    def weighted(self, losses):
        return (losses / self.temperature).mean()

    def loss(self, x, y):
        loss = self.weighted(F.cross_entropy(self.model(x), y, reduction="none"))
        self.temperature *= 0.95
        return loss


class Moving:
    mean = 0.5


def weigh_by_mean(losses):
    return (losses * kept["mean"]).mean()


def weigh_by_moving_mean(losses):
    return (losses * Moving.mean).mean()


class InGlobal(Baseline):
    def build(self):
        self.weighted = weigh_by_mean
        return super().build()

    def update(self, mean):
        kept["mean"] = mean


class InClass(Baseline):
    """A number that a class keeps."""

    def build(self):
        self.weighted = weigh_by_moving_mean
        return super().build()

    def update(self, mean):
        Moving.mean = mean


class InClosure(Baseline):
    def build(self):
        mean = 0.5

        def weighted(losses):
            return (losses * mean).mean()

        def update(new):
            nonlocal mean
            mean = new

        self.weighted, self.update = weighted, update
        return super().build()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [Baseline, AsTensor, Filled, InList, InClass, InGlobal, InClosure])
def test_a_number_that_another_pass_has_left_is_named_once_on_each_worker(program, num_workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(program, num_workers)
    # Simulated workers share a global, which thus differs between them, too.
    told = [each for each in caught if "a number that another tower's pass has left" in str(each.message)]
    assert 1 <= len(told) <= num_workers
    name = {
        "InList": "history[0] of self",
        "InClass": "mean of Moving",
        "InGlobal": "mean of kept",
        "InClosure": "mean",
    }
    assert f"loss depends on {name.get(program.__name__, 'baseline of self')}, " in str(told[0].message)


class UpdatedFirst(Baseline):
    """A running mean that each pass updates before it uses it."""

    steps = 2  # a sum that begins at 0 is, after one pass, what this one has computed

    def loss(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        self.update(losses.mean().item())
        return self.weighted(losses)

    def weighted(self, losses):
        return (losses / self.baseline).mean()


class AsTensorFirst(UpdatedFirst):
    def weighted(self, losses):
        return (losses * torch.tensor([1.0, self.baseline])[1]).mean()


class SetByTheFirstPass(UpdatedFirst):
    def build(self):
        self.mean = None
        return super().build()

    def update(self, mean):
        if self.mean is None:
            self.baseline = mean
        else:
            self.baseline = 0.9 * self.mean + 0.1 * mean
        self.mean = self.baseline


class Average:
    def __init__(self):
        self.sum, self.count, self.mean = 0.0, 0, 0.5

    def update(self, value):
        self.sum += value
        self.count += 1
        self.mean = self.sum / self.count


class OfAMeter(UpdatedFirst):
    def build(self):
        self.average = Average()
        return super().build()

    def update(self, mean):
        self.average.update(mean)

    def weighted(self, losses):
        return (losses / self.average.mean).mean()


class OfAWindow(UpdatedFirst):
    def build(self):
        self.window = deque([0.5], maxlen=4)
        return super().build()

    def update(self, mean):
        self.window.append(mean)
        self.baseline = sum(self.window) / len(self.window)


class InAFunction(UpdatedFirst):
    """The loop and its loss are functions, which share the mean."""

    def build(self):
        def loss(losses):
            nonlocal mean
            mean = 0.9 * mean + 0.1 * losses.mean().item()
            return (losses / mean).mean()

        mean = 1.0
        self.of = loss
        return super().build()

    def loss(self, x, y):
        return self.of(F.cross_entropy(self.model(x), y, reduction="none"))


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def push(self, value):
        self.total += value
        self.count += 1

    @property
    def mean(self):
        return self.total / self.count


class InMethods(UpdatedFirst):
    def build(self):
        self.meter = Meter()
        return super().build()

    def update(self, mean):
        self.meter.push(mean)

    def weighted(self, losses):
        return (losses / self.meter.mean).mean()


class ThroughAGenerator(InMethods):
    """The loop takes its towers from a generator of the program, such as a progress bar."""

    def __init__(self, job):
        self.model = self.build()
        towers = samestep.Towers(self.model, self.num_towers, job=job)
        for step in range(self.steps):
            for tower in self.shown(towers(self.batch(step))):
                self.run(tower)
            towers.average()

    def shown(self, towers):
        for number, tower in enumerate(towers):
            self.number = str(number)
            yield tower


class ByNext(InMethods):
    """A loop that takes its towers by `next`."""

    def __init__(self, job):
        self.model = self.build()
        towers = samestep.Towers(self.model, self.num_towers, job=job)
        for step in range(self.steps):
            turns = towers(self.batch(step))
            while (tower := next(turns, None)) is not None:
                self.run(tower)
            towers.average()


class InAStep(InMethods):
    """A loss function of a `Step`, which has the loop."""

    def __init__(self, job):
        self.model = self.build()
        towers = samestep.Towers(self.model, self.num_towers, job=job)
        step = samestep.Step(towers, self.of_batch, torch.optim.SGD(self.model.parameters(), 0.1))
        for number in range(self.steps):
            step(self.batch(number))

    def of_batch(self, model, batch):
        return self.loss(batch["x"], batch["y"])


class InAnExpression(UpdatedFirst):
    def weighted(self, losses):
        return (losses / (1 + self.baseline)).mean()


class UpdatedLast(Baseline):
    """A running mean that each pass computes with before torch gets the result."""

    def weighted(self, losses):
        return (losses * (1 - self.baseline)).mean()


class InATensor(Baseline):
    """In a tensor that is written to, and read as a number."""

    def build(self):
        self.held = torch.zeros(1)
        return super().build()

    def weighted(self, losses):
        return (losses / (1 + self.held.item())).mean()

    def update(self, mean):
        self.held.copy_(torch.tensor(mean))


class FilledTensor(InATensor):
    def update(self, mean):
        self.held.fill_(mean)


class AverageInATensor(InATensor):
    def update(self, mean):
        self.held.mul_(0.9).add_(0.1 * mean)


class ElementOfATensor(InATensor):
    def update(self, mean):
        self.held[0] = mean


class DataOfATensor(InATensor):
    def update(self, mean):
        self.held.data.copy_(torch.tensor([mean]))


class OtherDataOfATensor(InATensor):
    def update(self, mean):
        self.held.data = torch.tensor([mean])


class OfLabels(Program):
    """Weights of labels that follow how often they were seen."""

    def build(self):
        self.counts = Counter()
        return super().build()

    def loss(self, x, y):
        self.counts.update(y.tolist())
        weights = torch.tensor([1 / (1 + self.counts[label]) for label in range(3)])
        return (weights[y] * F.cross_entropy(self.model(x), y, reduction="none")).mean()


class InAnArray(Program):
    def build(self):
        self.counts = np.zeros(20)
        return super().build()

    def loss(self, x, y):
        self.counts += np.bincount(y.numpy(), minlength=20)
        weights = torch.from_numpy(1 / (1 + self.counts)).float()
        return (weights[y] * F.cross_entropy(self.model(x), y, reduction="none")).mean()


class Spikes(Program):
    """Losses that are much above the least one so far do not count."""

    def build(self):
        self.least = 1e9
        return super().build()

    def loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        if loss.item() > self.least:
            loss = loss * 0
        self.least = min(self.least, loss.item())
        return loss


class WeightedSpikes(Spikes):
    def loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        weight = 0.1 if loss.item() > self.least else 1.0
        self.least = min(self.least, loss.item())
        return weight * loss


class ByExample(UpdatedFirst):
    """A memory of each example's loss."""

    def loss(self, x, y):
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        key = x[0, 0].item()
        self.memory[key] = 0.7 * self.memory.get(key, 0.5) + 0.3 * losses.mean().item()
        return losses.mean() * self.memory[key]

    def build(self):
        self.memory = {}
        return super().build()


def use_running_mean(losses):
    kept["mean"] += 0.1 * (losses.mean().item() - kept["mean"])
    return (losses * kept["mean"]).mean()


class InADict(InAFunction):
    def build(self):
        self.of = use_running_mean
        return Program.build(self)


def told_of(program, num_workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(program, num_workers)
    return [str(each.message) for each in caught if "which each pass computes from" in str(each.message)]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 1, 7])
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (UpdatedFirst, "baseline of self"),
        (AsTensorFirst, "baseline of self"),
        (SetByTheFirstPass, "mean of self"),
        (OfAMeter, "sum of average of self"),
        (OfAWindow, "window of self"),
        (InAFunction, "mean"),
        (InADict, "mean of kept"),
    ],
)
def test_a_number_that_a_pass_computes_from_what_it_finds_is_named(program, name, num_workers):
    told = told_of(program, num_workers)
    assert 1 <= len(told) <= num_workers  # simulated workers share a global
    assert re.search(f"its loss depends on (.*, )?{name}(,.*)?, which", told[0])


class Growing(Baseline):
    """A tensor of all losses so far: one more for each pass."""

    def build(self):
        self.losses = []
        return super().build()

    def weighted(self, losses):
        self.losses.append(losses.mean().item())
        return (losses * torch.tensor(self.losses).mean()).mean()

    def update(self, mean):
        pass


class OfTheLastThree(Growing):
    def build(self):
        self.losses = deque(maxlen=3)
        return Baseline.build(self)

    def weighted(self, losses):
        self.losses.append(losses.mean().item())
        return (losses * torch.tensor(list(self.losses)).mean()).mean()


class AtLastEmptied(Growing):
    """A list that only some passes leave empty."""

    def run(self, tower):
        super().run(tower)
        if tower.batch["y"][0] == 1:
            self.losses.clear()


class Refilled(Baseline):
    """A dict that passes empty, and leave with another entry than the first one finds."""

    def build(self):
        self.state = {}
        return super().build()

    def weighted(self, losses):
        share = self.state.get("share", 0.3)
        self.state.clear()
        self.state["share"] = 0.6
        return losses.mean() * share

    def update(self, mean):
        pass


class AsASize(Baseline):
    """A count of passes, as the size of a tensor."""

    def build(self):
        self.count = 1
        return super().build()

    def weighted(self, losses):
        return losses.mean() * torch.arange(self.count).sum()

    def update(self, mean):
        self.count += 1


class InASize(AsASize):
    def weighted(self, losses):
        return losses.mean() * torch.ones(2, self.count).sum()


class AsAShift(AsASize):
    def weighted(self, losses):
        return (losses * torch.arange(float(len(losses))).roll(self.count)).mean()


class AsASeed(AsASize):
    def weighted(self, losses):
        generator = torch.Generator().manual_seed(self.count)
        return losses.mean() * torch.rand((), generator=generator)


class Switched(Baseline):
    """A switch that is off by default, but not here."""

    is_on = True

    def weighted(self, losses):
        return self.switched(losses, self.is_on)

    def switched(self, losses, is_on=False):
        if is_on:
            losses = losses * (1 + self.baseline)
        return losses.mean()


class SwitchedByAll(Switched):
    def weighted(self, losses):
        return self.switched(*(losses, self.is_on))


class SwitchedLater(Switched):
    """A switch that the function sets itself."""

    def weighted(self, losses):
        return self.later(losses)

    def later(self, losses, is_on=False):
        for _ in range(2):
            if is_on:
                losses = losses * (1 + self.baseline)
            is_on = not is_on
        return losses.mean()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 1, 3])
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (InMethods, "count of meter of self, total of meter of self"),
        (ThroughAGenerator, "count of meter of self, total of meter of self"),
        (ByNext, "count of meter of self, total of meter of self"),
        (InAStep, "count of meter of self, total of meter of self"),
        (InAnExpression, "baseline of self"),
        (UpdatedLast, "baseline of self"),
        (InATensor, "held of self"),
        (FilledTensor, "held of self"),
        (AverageInATensor, "held of self"),
        (ElementOfATensor, "held of self"),
        (DataOfATensor, "held of self"),
        (OtherDataOfATensor, "held of self"),
        (Annealed, "temperature of self"),
        (OfLabels, "counts of self"),
        (InAnArray, "counts of self"),
        (ByExample, "memory of self"),
        (Spikes, "least of self"),
        (WeightedSpikes, "least of self"),
        *((program, "count of self") for program in (AsASize, InASize, AsAShift, AsASeed)),
        *((program, "losses of self") for program in (Growing, AtLastEmptied, OfTheLastThree)),
        (Refilled, "share of state of self"),
        *((program, "baseline of self") for program in (Switched, SwitchedByAll, SwitchedLater)),
    ],
)
def test_what_an_expression_computes_from_such_numbers_is_named(program, name, num_workers):
    told = told_of(program, num_workers)
    may_be_right = issubclass(program, (Spikes, AtLastEmptied))  # on one of several workers
    assert len(told) == num_workers or (may_be_right and told)
    assert f"its loss depends on {name}, which" in told[0]


def test_a_number_that_a_loop_carries_on_is_named():
    samestep.init("cpu")
    model = torch.nn.Linear(3, 1)
    towers = samestep.Towers(model, 2)
    mean = 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tower in towers(torch.randn(10, 3)):
            loss = model(tower.batch).square().mean()
            mean = 0.9 * mean + 0.1 * loss.item()
            tower.backward(loss / mean)
    assert len(caught) == 1
    assert "tower 0: its loss depends on mean, which each pass" in str(caught[0].message)


class GrowingForTwoSteps(Growing):
    steps = 2


@pytest.mark.long
@pytest.mark.parametrize("program", [InMethods, InAnExpression, GrowingForTwoSteps])
def test_with_one_tower_per_worker_it_is_named_in_the_next_step(program):
    assert len(told_of(program, 7)) == 7


class MeterOfThePass(InMethods):
    """A meter of what each pass does."""

    def update(self, mean):
        self.meter.reset()
        for part in range(3):
            self.meter.push(mean + part)


class MeterForTheLog(InMethods):
    def weighted(self, losses):
        self.shown = f"{self.meter.mean:.3f}"
        return losses.mean() * (0.5 + losses.mean().item())


class LeastForTheLog(UpdatedFirst):
    """The least loss so far is mostly the one that the pass has used."""

    def update(self, mean):
        self.baseline = min(self.baseline or 9.0, mean)

    def weighted(self, losses):
        return losses.mean() * losses.mean().item()


class OfTheReports(UpdatedFirst):
    """A running mean of the losses of all towers, in the loop that takes the steps from a generator."""

    def __init__(self, job):
        self.model, self.old = self.build(), 1.5
        for report in self.reports(samestep.Towers(self.model, self.num_towers, job=job)):
            self.old = 0.9 * self.old + 0.1 * report.loss
        self.digest = samestep.digest(self.model)

    def reports(self, towers):
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        for step in range(4):
            for tower in towers(self.batch(step)):
                self.run(tower)
            yield towers.average()
            optimizer.step()

    def update(self, mean):
        self.baseline = 1 + self.old * mean


class ForTheLog(Baseline):
    """The running mean is printed, and no loss uses it."""

    def weighted(self, losses):
        self.shown = losses.detach() * self.baseline
        return losses.mean()


class SizesOfTheTower(Baseline):
    """Sizes of a tower's rows, and a seed of the step, beside a count for the log."""

    def build(self):
        self.count = 0
        return super().build()

    def batch(self, step):
        self.seed = step
        return super().batch(step)

    def weighted(self, losses):
        self.count += 1
        generator = torch.Generator().manual_seed(self.seed)
        shifted = torch.rand(len(losses), generator=generator).roll(len(losses) // 2)
        return (losses * shifted.view(-1, 1).repeat(1, len(losses)).mean(1)).mean()

    def update(self, mean):
        pass


class EmptiedByTheStep(Growing):
    """A list for the losses of a step, of which each pass uses its own."""

    steps = 3

    def batch(self, step):
        self.losses.clear()
        return super().batch(step)

    def weighted(self, losses):
        self.losses.append(losses.mean().item())
        return (losses * torch.tensor(self.losses[-1])).mean()


class EmptiedByThePass(Growing):
    """A list that each pass fills, uses and leaves empty, as policies keep their actions."""

    def run(self, tower):
        super().run(tower)
        del self.losses[:]

    def weighted(self, losses):
        self.losses.extend(losses.tolist())
        returns = torch.tensor(self.losses)
        return (losses * (returns - returns.mean())).mean()


class MaskOfTheLength(Baseline):
    """A mask for all lengths so far, that a switch, which is on by default, turns off."""

    def build(self):
        self.mask = None
        return super().build()

    def weighted(self, losses, has_mask=True):
        if has_mask:
            if self.mask is None or len(self.mask) != len(losses):
                mask = torch.log(torch.tril(torch.ones(len(losses), len(losses))))
                self.mask = mask
        else:
            self.mask = None
        return (losses * self.mask.exp().mean(0)).mean()

    def update(self, mean):
        pass


class MeanForTheLog(UpdatedFirst):
    """The running mean is printed, relative to the loss."""

    def weighted(self, losses):
        self.shown = losses.detach() / self.baseline
        return losses.mean()


class ComputedAnew(UpdatedFirst):
    """A number by `.item()` of this tower, which is printed before the next one."""

    def build(self):
        self.shown, self.running = [], 0.0
        return super().build()

    def update(self, mean):
        self.shown.append(self.baseline)
        self.baseline = 1 / (1 + mean)
        self.running += self.baseline


def mean_for_the_log(losses):
    factor = 0.5 + losses.mean().item()
    kept["count"] = kept.get("count", 0) + 1
    kept["mean"] += (factor - kept["mean"]) / kept["count"]
    return (losses * factor).mean()


class FilledByThePass(InATensor):
    """In a tensor that each pass writes before it reads it."""

    def weighted(self, losses):
        self.held.fill_(losses.mean().item())
        return super().weighted(losses)


class AddedUpByThePass(InATensor):
    def weighted(self, losses):
        self.held.zero_()
        for loss in losses:
            self.held.add_(loss.detach())
        return super().weighted(losses)


class MeanOfFactors(InADict):
    """A running mean that is, after one pass, the factor that this pass has used."""

    def build(self):
        kept.update(mean=0.0, count=0)
        self.of = mean_for_the_log
        return Program.build(self)


class OneOfTwo(UpdatedFirst):
    """Code that would carry a number on does not run."""

    def update(self, mean):
        if self.num_towers < 2:
            self.baseline = 0.9 * self.old + 0.1 * mean
            self.old = self.baseline
        else:
            self.baseline = mean + 0.5


class Drawn(UpdatedFirst):
    """A number from a generator that is seeded for each tower."""

    def update(self, mean):
        self.baseline = random.uniform(0.5, 1.5)


class SpikesOfTheTower(Spikes):
    """What counts less does not depend on earlier losses, which are kept for the log."""

    def loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        if loss.item() > 1.1:
            loss = loss * 0.1
        if loss.item() < self.least:
            self.least = loss.item()
            self.shown = loss.detach() * 0.5
        return loss


class Remembered(UpdatedFirst):
    """What is computed once for each example."""

    def build(self):
        self.known = {}
        return super().build()

    def loss(self, x, y):
        key = x[0, 0].item()
        if key not in self.known:
            self.known[key] = 1 / (1 + x.numpy().std(0))
        return F.cross_entropy(self.model(x * torch.from_numpy(self.known[key])), y)


class OfSizes(UpdatedFirst):
    """A table that grows with the largest tower so far."""

    def build(self):
        self.size = 0
        return super().build()

    def loss(self, x, y):
        if len(x) > self.size:
            self.size, self.table = len(x), torch.arange(1.0, 1 + len(x)).reciprocal()
        return F.cross_entropy(self.model(x) * self.table[: len(x), None], y)


class SumOfTheTower(UpdatedFirst):
    """A sum over the labels of a tower."""

    def loss(self, x, y):
        total, found = 0.1, {"share": 1.5}
        for label in range(3):
            share = (y == label).float().mean().item()
            total += share * (0.3 + label)
        found["share"] *= share
        return F.cross_entropy(self.model(x) * (total + found["share"]), y)


class Rotary(UpdatedFirst):
    """Tables and masks that grow with the longest row so far, kept from step to step."""

    def build(self):
        self.longest, self.waves, self.mask, self.tables = 0, None, torch.empty(0), {}
        return super().build()

    def turned(self, length):
        if length > self.longest:
            self.longest = length
            self.waves = torch.outer(torch.arange(1.0, 1 + length), torch.tensor([0.1, 0.2, 0.3])).cos()
        return self.waves[:length]

    def masked(self, length):
        if self.mask.size(0) >= length:
            return self.mask[:length, :length]
        self.mask = torch.full([length, length], 0.5).tril()
        return self.mask

    def scaled(self, length):
        table = self.tables.get(length)
        if table is None:
            self.tables[length] = table = 1 / (1 + torch.arange(length))
        return table

    def loss(self, x, y):
        length = x.shape[1]
        x = x @ self.masked(length) * self.scaled(length)
        return F.cross_entropy(self.model(x) * self.turned(length)[-1], y)


class OfEachTower(UpdatedFirst):
    """A running mean for each tower."""

    def build(self):
        self.means = {}
        return super().build()

    def run(self, tower):
        loss = self.loss(tower.batch["x"], tower.batch["y"])
        self.means[tower.index] = 0.9 * self.means.get(tower.index, 1.5) + 0.1 * loss.item()
        tower.backward(loss / self.means[tower.index])

    def update(self, mean):
        self.shown = mean


class Quotient(Baseline):
    """A quotient of sizes, which changes between towers."""

    def weighted(self, losses):
        self.share = 1 / len(losses)
        return losses.sum() * self.share

    def update(self, mean):
        self.shown = mean


class Searched(Baseline):
    """A step size that each pass finds by halving, and that the last one leaves."""

    def weighted(self, losses):
        self.size = 0.1
        while (self.size * losses).max() > 0.05:
            self.size /= 2
        return (self.size * losses).mean()

    def update(self, mean):
        self.shown = mean


class OfTheTower(Baseline):
    """A factor that is set in each pass."""

    def run(self, tower):
        self.factor = 1 / (1.5 + tower.index)
        super().run(tower)

    def weighted(self, losses):
        return losses.mean() * self.factor

    def update(self, mean):
        self.shown = mean


class OneOfAList(Baseline):
    """A factor that each pass takes from a list: some follow one that took the same."""

    def build(self):
        self.factors, self.factor = [0.3, 0.7], 0.3
        return super().build()

    def run(self, tower):
        self.factor = self.factors[tower.index % 4 // 2]
        super().run(tower)

    def weighted(self, losses):
        return losses.mean() * self.factor

    def update(self, mean):
        self.shown = mean


class OneOfTheCode(OneOfAList):
    def run(self, tower):
        self.factor = 0.4 if tower.index % 4 < 2 else 0.6
        Baseline.run(self, tower)


class Unrolled(Program):
    """A mean that a step computes from the last one's report; `next` takes two of its towers."""

    steps = 3

    def __init__(self, job):
        self.model, mean = self.build(), 1.0
        towers = samestep.Towers(self.model, 2, job=job)
        for step in range(self.steps):
            turns = towers(self.batch(step))
            self.run(next(turns), mean)
            if (tower := next(turns, None)) is not None:
                self.run(tower, mean)
            mean = 0.9 * mean + 0.1 * towers.average().loss
        self.digest = samestep.digest(self.model)

    def run(self, tower, mean):
        tower.backward(F.cross_entropy(self.model(tower.batch["x"]), tower.batch["y"]) / (1 + mean))


class FromTheStep(Annealed):
    """A temperature that the first pass of a step sets."""

    def loss(self, x, y):
        if self.temperature == 1.0:
            self.temperature = 1 / 1.05
        return self.weighted(F.cross_entropy(self.model(x), y, reduction="none"))


class AfterTheStep(Baseline):
    """The baseline is updated once a step, from all towers."""

    def update(self, mean):
        self.sum = getattr(self, "sum", 0.0) + mean

    def batch(self, step):
        self.baseline = 0.25 * step
        return super().batch(step)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "program",
    [
        *(
            MeterOfThePass,
            MeterForTheLog,
            LeastForTheLog,
            OfTheReports,
            ForTheLog,
            MeanForTheLog,
            ComputedAnew,
            FilledByThePass,
            AddedUpByThePass,
            MeanOfFactors,
            OneOfTwo,
            Drawn,
            SpikesOfTheTower,
            Remembered,
            OfSizes,
            SumOfTheTower,
            Rotary,
            OfEachTower,
            Quotient,
            Searched,
            OfTheTower,
            OneOfAList,
            OneOfTheCode,
        ),
        *(FromTheStep, AfterTheStep, EmptiedByThePass, EmptiedByTheStep, MaskOfTheLength),
        SizesOfTheTower,
    ],
)
def test_other_numbers_give_no_warning(program, num_workers):
    outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert len({outcome.value.digest for outcome in outcomes}) == 1


def test_a_loop_in_a_function_is_searched_too():
    def train():
        mean = 0.0
        for tower in towers(torch.randn(10, 3)):
            outputs = model(tower.batch)
            tower.backward((outputs * mean + outputs).square().mean())
            mean = 0.5 * mean + 0.5 * outputs.mean().item()

    samestep.init("cpu")
    model = torch.nn.Linear(3, 1)
    towers = samestep.Towers(model, 5)
    with pytest.warns(UserWarning, match="loss depends on mean, a number"):
        train()


def test_what_is_left_is_forgotten_between_steps():
    """The number of the last pass goes into the next step's first one, as one that the loop updates there."""
    samestep.init("cpu")
    model = torch.nn.Linear(3, 1)
    towers = samestep.Towers(model, 2)
    mean = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "computed from the passes of this worker alone")
        for _ in range(3):
            found = []
            for tower in towers(torch.randn(10, 3)):
                outputs = model(tower.batch)
                tower.backward((outputs * mean + outputs).square().mean())
                found.append(outputs.mean().item())
            towers.average()
            mean = sum(found) / 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loop_over_steps_is_none_over_towers(num_workers):
    outcomes = simulate(Unrolled, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
