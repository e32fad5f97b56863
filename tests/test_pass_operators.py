"""Passes that compute their losses in another way than others without having read what differs: a warning."""

import functools
import importlib
import os
import random
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep import Towers
from samestep.watching.operators.operator_calls import Call
from samestep.watching.operators.origins import storage_of
from samestep.watching.passes.pass_operators import PassOperators
from samestep.watching.passes.reads import Reads

from .nets import net, unseen_count
from .simulation import simulate
from .test_flow import Program

pytestmark = pytest.mark.sampled

ANOTHER_WAY = "its loss was computed in another way than that of tower "


@functools.cache
def warnings_of(program, num_workers):
    """Return the warnings of a program, which is run once, and the digests that its workers end with."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    return [str(each.message) for each in caught], {outcome.value.digest for outcome in outcomes}


# ---- wrong: what a pass computes depends on earlier passes, or on the time -------------------------


class EveryOther(Program):
    """A term in every other pass."""

    def build(self):
        self.calls = unseen_count()
        return net()

    def loss(self, x, y):
        loss = super().loss(x, y)
        return loss if self.calls() % 2 else loss + self.model(x).abs().mean()


class Weighted(EveryOther):
    """A weight that is a simple fraction of the number of passes."""

    def loss(self, x, y):
        num_passes = 1 + self.calls()
        return Program.loss(self, x, y) + num_passes / 30 * self.model(x).square().mean()


class Rolled(EveryOther):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x.roll(self.calls(), 1)), y)


class RolledAndLogged(Rolled):
    """Keeps the loss and the accuracy for a log."""

    def run(self, tower):
        x, y = tower.batch["x"], tower.batch["y"]
        outputs = self.model(x.roll(self.calls(), 1))
        loss = F.cross_entropy(outputs, y)
        self.shown = loss.item(), (outputs.argmax(1) == y).float().mean().item()
        tower.backward(loss)


class HeadsInTurns(EveryOther):
    def build(self):
        super().build()
        return nn.ModuleList([net(), net()])

    def loss(self, x, y):
        return F.cross_entropy(self.model[self.calls() % 2](x), y)


class ByTheClock(Program):
    def loss(self, x, y):
        return super().loss(x, y) * (1 + time.perf_counter() % 1)


class FromTheSystem(Program):
    def loss(self, x, y):
        return super().loss(x, y) * (1 + random.SystemRandom().random())


class ArrayThatChanges(Program):
    """An array that each pass changes, without reading its rows."""

    def build(self):
        self.scale = np.ones(6, np.float32)
        return net()

    def loss(self, x, y):
        np.multiply(self.scale, 0.9, out=self.scale)
        return super().loss(x * torch.from_numpy(self.scale), y)


class Seeding(EveryOther):
    """Another seed for each pass, by a count of passes: that of the global generators."""

    def loss(self, x, y):
        torch.manual_seed(self.calls())
        return super().loss(x + torch.randn_like(x), y)


class SeedingAnew(Program):
    """Seeds of the system's."""

    def loss(self, x, y):
        torch.seed()
        return super().loss(F.dropout(x, 0.3), y)


class SeedingItsOwn(EveryOther):
    """The same for a generator that the pass creates."""

    def loss(self, x, y):
        generator = torch.Generator().manual_seed(self.calls())
        return Program.loss(self, x[torch.randperm(len(x), generator=generator)], y)


class SeedingForAWhile(EveryOther):
    def loss(self, x, y):
        with torch.random.fork_rng():
            torch.manual_seed(self.calls())
            x = F.dropout(x, 0.3)
        return Program.loss(self, x, y)


class SeedingPythons(EveryOther):
    """The same for Python's generator."""

    def loss(self, x, y):
        random.seed(self.calls())
        return Program.loss(self, x * random.random(), y)


class ShufflingPythons(SeedingPythons):
    def loss(self, x, y):
        random.seed(f"pass {self.calls()}")
        order = list(range(x.shape[1]))
        random.shuffle(order)
        return Program.loss(self, x[:, order], y)


class EveryOtherAgain(EveryOther):
    """Another forward, which updates the statistics of batch norm once more."""

    def build(self):
        super().build()
        return net_with_batch_norm()

    def loss(self, x, y):
        loss = Program.loss(self, x, y)
        if self.calls() % 3 == 2:
            self.model(x)
        return loss


class LoggedFirst(Weighted):
    """Reads the loss, but only after it was computed."""

    def loss(self, x, y):
        loss = super().loss(x, y)
        self.shown = loss.item()
        return loss


class AfterAMask(EveryOther):
    """Reads values that are the same in all passes, as language models do to see if rows are padded."""

    def loss(self, x, y):
        mask = y > -1
        if mask.all() and not torch.equal(x, -x):
            return super().loss(x[mask], y[mask])
        return x.sum()


class Settings(dict):
    """Looks up names in the way of a dict, in a module that is not one of Python's."""

    def get(self, name):
        return super().get(name, 1)


class AfterALookup(EveryOther):
    def loss(self, x, y):
        return super().loss(x, y) * Settings().get("weight")


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 1, 3])
@pytest.mark.parametrize(
    "program",
    [
        *(EveryOther, Weighted, Rolled, HeadsInTurns, ByTheClock, FromTheSystem, ArrayThatChanges),
        *(RolledAndLogged, LoggedFirst, AfterAMask, AfterALookup, SeedingItsOwn, SeedingForAWhile),
        *(SeedingAnew, SeedingPythons, ShufflingPythons),
    ],
)
def test_what_a_pass_computes_by_itself_is_told_of_once_on_each_worker(program, num_workers):
    told, _ = warnings_of(program, num_workers)
    found = [each for each in told if ANOTHER_WAY in each]
    assert len(found) == num_workers
    assert all("in test_pass_operators.py, line " in each for each in found)


def test_another_forward_of_batch_norm_in_some_passes_is_told_of():
    told, _ = warnings_of(EveryOtherAgain, 1)
    assert len(told) == 1
    assert told[0].startswith(
        "step 0, tower 2: its buffers were computed in another way than those of tower 0, from "
        "aten.add_(1) in test_pass_operators.py, line "
    )


def test_what_an_import_reads_is_not_read_by_the_pass(tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_pass.py").write_text("import torch\ntorch.zeros(1).tolist()\n")
    monkeypatch.syspath_prepend(tmp_path)
    reads = Reads()
    reads.start(is_known=True)
    importlib.import_module("imported_by_a_pass")
    was_found = reads.found
    torch.zeros(1).tolist()
    reads.stop()
    assert (was_found, reads.found) == (False, True)


@pytest.mark.long
def test_a_warning_names_the_number_and_the_line():
    told, _ = warnings_of(Weighted, 1)
    line = Weighted.loss.__code__.co_firstlineno + 2
    assert told[0].startswith(
        f"step 0, tower 1: {ANOTHER_WAY}0, from aten.mul(0.0666667) in test_pass_operators.py, line {line} on"
    )


def test_a_profiler_of_the_programs_own_goes_on():
    reads, hook = Reads(), lambda *_: None
    sys.setprofile(hook)
    reads.start(is_known=True)
    reads.stop()
    found = sys.getprofile()
    sys.setprofile(None)
    assert reads.found
    assert found is hook


def test_a_profiler_that_a_pass_starts_hides_what_it_reads():
    reads = Reads()
    reads.start(is_known=True)
    assert reads.is_complete()
    sys.setprofile(None)
    assert not reads.is_complete()


# ---- wrong: what a pass computes depends on the worker --------------------------------------------


class ByRank(Program):
    def __init__(self, job):
        self.rank = job.rank
        super().__init__(job)

    def loss(self, x, y):
        return super().loss(x, y) * (1 + self.rank / 100)


class HookOnOneWorker(ByRank):
    def build(self):
        model = net()
        if self.rank == 0:
            next(model.children()).register_forward_hook(lambda module, given, outputs: 2 * outputs)
        return model


class GradientsByRank(ByRank):
    """By a hook that runs in backward."""

    def loss(self, x, y):
        outputs = self.model(x)
        outputs.register_hook(lambda gradient: gradient * (1 + self.rank / 100))
        return F.cross_entropy(outputs, y)


def net_with_batch_norm():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class AgainOnOneWorker(ByRank):
    """Another forward, for a log, which updates the statistics of batch norm once more."""

    def build(self):
        return net_with_batch_norm()

    def loss(self, x, y):
        loss = Program.loss(self, x, y)
        if self.rank == 0:
            with torch.no_grad():
                self.model(x)
        return loss


class OutputsByRank(ByRank):
    """For a loss of the whole batch."""

    def __init__(self, job):
        torch.manual_seed(0)
        model = net()
        towers = Towers(model, 7, job=job)
        scale = 1 + job.rank / 100
        towers.whole_batch(
            self.batch(0), lambda part: model(part["x"]) * scale, lambda outputs, _: outputs.var(0).sum()
        )
        towers.average()
        self.digest = samestep.digest(model)


class SeededByRank(ByRank):
    """One generator for all passes of a worker."""

    num_towers = 2

    def build(self):
        self.generator = torch.Generator().manual_seed(self.rank)
        return net()

    def loss(self, x, y):
        return F.cross_entropy(self.model(x + torch.rand(len(x), 6, generator=self.generator)), y)


class HookForTheLog(ByRank):
    """One worker's hook that no loss depends on."""

    loss = Program.loss

    def build(self):
        model, self.norms = net(), []
        if self.rank == 0:
            next(model.children()).register_forward_hook(
                lambda module, given, outputs: self.norms.append(outputs.norm().item())
            )
        return model


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 7])
@pytest.mark.parametrize(
    ("program", "what"),
    [
        *((ByRank, "loss"), (HookOnOneWorker, "loss"), (GradientsByRank, "gradients")),
        *((AgainOnOneWorker, "buffers"), (OutputsByRank, "outputs")),
    ],
)
def test_what_a_worker_computes_by_itself_is_told_of_once_on_each(program, what, num_workers):
    told, _ = warnings_of(program, num_workers)
    assert len(told) == num_workers
    assert all(f"computed the {what} of tower " in each for each in told)
    assert all("it depends on the worker, as with its rank, a hook" in each for each in told)


def test_a_generator_seeded_by_rank_is_told_of_where_each_worker_has_one_tower():
    told, _ = warnings_of(SeededByRank, 2)
    assert len([each for each in told if "from aten.rand(), seeded by 1, in" in each]) == 2


@pytest.mark.long
def test_a_seed_that_counts_passes_is_named():
    told, _ = warnings_of(Seeding, 1)
    assert "from aten.randn_like(), seeded by 2, in test_pass_operators.py" in told[0]


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 7])
def test_a_hook_for_the_log_of_one_worker_is_let_through(num_workers):
    assert warnings_of(HookForTheLog, num_workers)[0] == []


# ---- right: what a pass computes depends on what it has read --------------------------------------


class ByIndex(Program):
    def run(self, tower):
        self.is_even = tower.index % 2 == 0
        super().run(tower)

    def loss(self, x, y):
        return super().loss(x.flip(1) if self.is_even else x, y)


class ByRows(Program):
    """Chooses by values of the rows, read in several ways."""

    def loss(self, x, y):
        loss = super().loss(x, y)
        loss = loss * (1 + sum(y.tolist()) / 7)
        loss = loss * (1 + int(np.asarray(x).argmax()))
        loss = loss * (1 + y.numpy().mean().item())
        return loss + len(x[y > 0]) / 9 * self.model(x).mean()


class ByLabels(Program):
    def loss(self, x, y):
        labels = y.tolist()
        return super().loss(x, y) * (1 + labels[0])


class ByOutputs(Program):
    def loss(self, x, y):
        return super().loss(x, y) * (2 if self.model(x).mean() > 0 else 1)


class BestOfThree(Program):
    """Chooses between losses that have been computed."""

    def loss(self, x, y):
        losses = [F.cross_entropy(self.model(each), y) for each in (x, x.flip(0), x.flip(1))]
        return min(losses, key=float)


class BestOfThreeGoesOn(BestOfThree):
    def loss(self, x, y):
        return super().loss(x, y) + self.model(x).square().mean()


class AgainByRows(Program):
    """Another forward of batch norm."""

    def build(self):
        return net_with_batch_norm()

    def loss(self, x, y):
        outputs = self.model(x)
        if outputs.sum() > 0:
            self.model(x)
        return F.cross_entropy(outputs, y)


class BufferByRows(Program):
    """Puts one of two tensors, both computed, in a buffer's place."""

    buffers = types.MappingProxyType({"center": "mean"})

    def build(self):
        model = net()
        model.register_buffer("center", torch.zeros(3))
        return model

    def loss(self, x, y):
        outputs = self.model(x)
        least, most = outputs.detach().amin(0), outputs.detach().amax(0)
        self.model.center = least if x.sum() > 0 else most
        return F.cross_entropy(outputs, y)


class BySize(Program):
    """Chooses by how many rows are selected."""

    def loss(self, x, y):
        chosen = y[y > 0]
        return super().loss(x, y) * (2 if len(chosen) > 1 else 1)


@torch.library.custom_op("samestep_tests::select_positive", mutates_args=())
def select_positive(x: torch.Tensor) -> torch.Tensor:
    """Return the elements above zero, as an extension does whose schema says nothing of sizes."""
    return x[x > 0]


class ByOwnOperator(Program):
    def loss(self, x, y):
        return super().loss(x, y) * len(select_positive(x.flatten()))


class ByPython(Program):
    def loss(self, x, y):
        return super().loss(x, y) * random.uniform(0.5, 1)


class ByNumPy(Program):
    def loss(self, x, y):
        return super().loss(x, y) * float(np.random.beta(0.4, 0.4))


class BySeed(Program):
    def loss(self, x, y):
        return super().loss(x, y) * random.Random(torch.initial_seed()).random()


class BySeedOfPythons(Program):
    """Seeds Python's generator alike in all passes, and by what is the tower's."""

    def run(self, tower):
        self.tower = tower
        super().run(tower)

    def loss(self, x, y):
        random.seed(7)
        loss = super().loss(x * random.random(), y)
        random.seed(self.tower.index)
        return loss * random.uniform(0.5, 1)


class SeededByARandomNumber(Program):
    def loss(self, x, y):
        random.seed(random.randrange(99))
        return super().loss(x, y) * random.uniform(0.5, 1)


class SeedingPythonsForAWhile(Program):
    def loss(self, x, y):
        state = random.getstate()
        random.seed(7)
        x = x * random.random()
        random.setstate(state)
        return super().loss(x, y) * random.uniform(0.5, 1)


class SeededByIndex(Program):
    def run(self, tower):
        self.generator = torch.Generator().manual_seed(tower.index)
        torch.manual_seed(tower.index)
        super().run(tower)

    def loss(self, x, y):
        return super().loss(F.dropout(x, 0.3) + torch.rand(len(x), 6, generator=self.generator), y)


class SeededAlike(Program):
    """The same noise in all passes, and that of the tower again after it."""

    def loss(self, x, y):
        torch.manual_seed(7)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            x = x + torch.randn(6)
        return super().loss(F.dropout(x, 0.3), y)


class Recomputing(Program):
    """Draws the same numbers again, by their seed."""

    def loss(self, x, y):
        outputs = checkpoint(lambda x: F.dropout(self.model(x), 0.3), x, use_reentrant=False)
        return F.cross_entropy(outputs, y)


class Noisy(Program):
    def loss(self, x, y):
        return super().loss(
            F.dropout(x + 0.1 * torch.randn_like(x), 0.3), y[torch.randperm(len(y)).argsort()]
        )


class GrowingMask(Program):
    """A mask that the first pass makes, and longer passes make again."""

    mask = torch.zeros(0, 0)

    def loss(self, x, y):
        if len(x) > len(self.mask):
            self.mask = torch.ones(2 * len(x), 2 * len(x)).tril()
        return F.cross_entropy(self.mask[: len(x), : len(x)] @ self.model(x) / len(x), y)


class CachedMask(Program):
    def build(self):
        self.mask = functools.cache(lambda n: torch.linspace(0, 1, n).exp()[:, None])
        return net()

    def loss(self, x, y):
        return super().loss(x * self.mask(len(x)), y)


class CachedFromWeights(Program):
    """Outputs of a frozen net for fixed inputs, which the first pass computes."""

    def build(self):
        self.other = net().requires_grad_(False)
        return net()

    def loss(self, x, y):
        texts = self.keep("texts", lambda: self.other(torch.eye(6)))
        return super().loss(x, y) + F.mse_loss(self.model(x), x @ texts)


class Scratch(Program):
    """Memory that each pass overwrites, and that may grow."""

    def loss(self, x, y):
        memory = self.keep("memory", lambda: torch.empty(8, 6))
        memory[: len(x)] = x
        total = torch.zeros(3)
        for row in self.model(memory[: len(x)]):
            total = total.add_(row)
        filled = torch.empty(len(x), 3)
        filled[:, :1] = x[:, :1]
        filled[:, 1:].zero_()
        return super().loss(x, y) + total.square().mean() + (self.model(x) * filled).mean()


class Logging(Program):
    """Work for the log in some passes, which no loss uses."""

    count = 0
    total = torch.zeros(())

    def loss(self, x, y):
        self.count += 1
        loss = super().loss(x, y)
        if self.count % 3 == 1:
            self.norm = sum(p.norm() for p in self.model.parameters()) * self.count
        self.total = self.total + loss.detach() / self.count
        return loss


class Labels(Program):
    """Rows in Python, which are different for each tower."""

    def batch(self, step):
        batch = super().batch(step)
        return {**batch, "weights": [each / 7 for each in range(len(batch["x"]))]}

    def run(self, tower):
        x, y, weights = (tower.batch[name] for name in ("x", "y", "weights"))
        tower.backward(self.loss(x, y) * (1 + sum(weights)))


class InNumPy(Labels):
    def batch(self, step):
        batch = super().batch(step)
        return {**batch, "weights": np.array(batch["weights"])}


IN_PROTOTYPE = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Nested(Program):
    """Tensors of other lengths in one; those of torch's first kind have no shape."""

    layout = torch.strided

    def loss(self, x, y):
        rows = torch.nested.as_nested_tensor([*self.model(x)], layout=self.layout)
        return F.cross_entropy(torch.nested.to_padded_tensor(rows * 2, 0.0), y)


class Jagged(Nested):
    layout = torch.jagged


class Packed(Program):
    """Sequences of different lengths."""

    def build(self):
        return nn.ModuleList([nn.GRU(1, 3, batch_first=True), net()])

    def loss(self, x, y):
        packed = nn.utils.rnn.pack_padded_sequence(
            x[..., None], y + 2, batch_first=True, enforce_sorted=False
        )
        outputs, _ = self.model[0](packed)
        return F.cross_entropy(self.model[1](x), y) + outputs.data.sum() / len(outputs.data)


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    "program",
    [
        *(
            BestOfThree,
            BestOfThreeGoesOn,
            BySize,
            ByOwnOperator,
            ByIndex,
            ByRows,
            ByLabels,
            ByOutputs,
            ByPython,
            ByNumPy,
            BySeed,
            BySeedOfPythons,
            SeededByARandomNumber,
            SeedingPythonsForAWhile,
            Noisy,
            GrowingMask,
            CachedMask,
        ),
        *(CachedFromWeights, Scratch, Logging, Labels, InNumPy, Packed, Jagged),
        pytest.param(Nested, marks=IN_PROTOTYPE),
        *(SeededByIndex, SeededAlike, Recomputing, AgainByRows, BufferByRows),
    ],
)
def test_what_a_pass_may_choose_by_gives_no_warning(program):
    found = [warnings_of(program, num_workers) for num_workers in (1, 3)]
    assert not [each for told, _ in found for each in told if "in another way than" in each]
    assert len(set.union(*(digests for _, digests in found))) == 1


# ---- the parts -------------------------------------------------------------------------------------


def test_memory_that_unknown_code_writes_to_is_not_compared():
    """As extensions do that are no operators of torch: they allocate, and then write."""
    reads = Reads()
    operators = PassOperators(reads)
    for tower in range(2):
        rows, aten = torch.ones(2), torch.ops.aten
        reads.start(is_known=True)
        operators.start_pass(tower, [rows], [])
        empty = run(operators, aten.empty_like.default, rows)
        empty.data.fill_(tower)
        loss = run(operators, aten.mul.Tensor, empty, rows)
        operators.note_losses([loss])
        reads.stop()
        assert reads.found
    operators.check("a pass")  # no warning


def test_a_buffer_that_a_pass_frees_is_not_taken_for_a_later_tensor_at_its_address():
    """As where a forward assigns a new tensor to a buffer."""
    reads = Reads()
    operators = PassOperators(reads)
    for tower in range(2):
        rows, buffer = torch.ones(2), torch.ones(2)
        address = storage_of(buffer)
        reads.start(is_known=True)
        operators.start_pass(tower, [rows], [buffer])
        with reads.ignored():
            if tower == 1:
                del buffer
            made = [torch.full((2,), 3.0) for _ in range(100)]
            again = [each for each in made if storage_of(each) == address]
            loss = run(operators, torch.ops.aten.mul.Tensor, (again or made)[0], rows)
        operators.note_losses([loss])
        reads.stop()
    assert operators.outcomes
    operators.check("a pass")  # no warning


def run(operators, func, *args):
    call = Call.of(func, args, {})
    operators.start(call)
    result = call.run()
    operators.finish(call, result)
    return result


def test_calls_that_may_read_what_differs():
    reads, x = Reads(), torch.ones(2)

    def found(action):
        reads.start(is_known=True)
        action()
        reads.stop()
        return reads.found

    for action in (x.tolist, x.numpy, random.random, torch.initial_seed, lambda: np.asarray(x), x.data_ptr):
        assert found(action), action
    for action in (
        x.size,
        Settings(a=1).keys,
        lambda: Settings().get("a"),
        time.time,
        lambda: os.urandom(4),
        lambda: hash("a"),
        random.SystemRandom().random,
    ):
        assert not found(action), action
    assert sys.getprofile() is None
