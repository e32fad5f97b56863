"""State that programs keep from one tower's pass to the next: an error, on 1, 2 and 3 workers, if it affects
another tower's loss, or weights; otherwise the digest is the same."""

import copy
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

import samestep
from samestep import Towers

from .cases import mostly_long
from .nets import batch_of, loss_of, net
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([3, 1, 2], 1)
DEPENDS = "its loss depends on rows or random numbers of tower"


class Program:
    """A training loop; its passes may keep state in attributes."""

    num_towers = 7
    steps = 2
    buffers = None  # their policies

    def __init__(self, job):
        torch.manual_seed(0)
        self.model = self.build()
        towers = Towers(self.model, self.num_towers, job=job, buffers=self.buffers)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        for step in range(self.steps):
            for tower in towers(self.batch(step)):
                self.run(tower)
            towers.average()
            optimizer.step()
        self.digest = samestep.digest(self.model)

    def build(self):
        return net()

    def batch(self, step):
        return batch_of(step, 21 - step % 3)

    def run(self, tower):
        tower.backward(self.loss(tower.batch["x"], tower.batch["y"]))

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def keep(self, name, make):
        """Return the attribute `name`; the first pass that asks for it creates it."""
        if not hasattr(self, name):
            setattr(self, name, make())
        return getattr(self, name)


def errors(program, num_workers):
    outcomes = simulate(program, num_workers, num_workers)
    assert all(isinstance(outcome.error, samestep.Error) for outcome in outcomes), outcomes
    return [outcome.text for outcome in outcomes]


# ---- state that affects another tower's loss -------------------------------------------------------


class HiddenState(Program):
    def build(self):
        self.state = None
        return nn.ModuleList([nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)])

    def loss(self, x, y):
        hidden, state = self.model[0](x[None], self.state)
        self.state = tuple(each.detach() for each in state)
        return F.cross_entropy(self.model[1](hidden[0]), y)


class RunningMean(Program):
    def loss(self, x, y):
        z = self.model(x)
        center = self.keep("center", lambda: torch.zeros(3))
        self.center = 0.9 * center + 0.1 * z.detach().mean(0)
        return F.cross_entropy(z - center, y)


class RunningMeanInPlace(Program):
    def loss(self, x, y):
        z = self.model(x)
        center = self.keep("center", lambda: torch.zeros(3))
        loss = F.cross_entropy(z - center, y)
        center.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return loss


class RunningMeanInBuffer(RunningMean):
    """In a buffer that passes do not share."""

    buffers = types.MappingProxyType({"center": "ignore"})

    def build(self):
        model = net()
        model.register_buffer("center", torch.zeros(3))
        return model

    def loss(self, x, y):
        z = self.model(x)
        loss = F.cross_entropy(z - self.model.center, y)
        self.model.center.lerp_(z.detach().mean(0), 0.1)
        return loss


class MemoryBank(Program):
    def loss(self, x, y):
        z, bank = self.model(x), self.keep("bank", lambda: torch.zeros(32, 3))
        at = self.keep("at", lambda: 0)
        loss = (z @ bank.t().clone()).logsumexp(1).mean()
        bank[at : at + len(z)] = z.detach()
        self.at = (at + len(z)) % 28
        return loss


class MemoryOfLabels(Program):
    """A mean for each class: a pass reads all of them, and writes those of the classes in its rows."""

    def loss(self, x, y):
        z, means = self.model(x), self.keep("means", lambda: torch.zeros(3, 3))
        loss = F.cross_entropy(z @ means.t().clone(), y)
        means[y] = z.detach()
        return loss


class Histogram(Program):
    def loss(self, x, y):
        counts = self.keep("counts", lambda: torch.ones(3))
        counts.index_put_((y,), torch.ones(()), accumulate=True)
        return F.cross_entropy(self.model(x), y, weight=1 / counts)


class MemoryOfExamples(Program):
    """A value for each example, on the worker that had it; in the next epoch another worker may have it."""

    def batch(self, step):
        batch = super().batch(step)
        return batch | {"at": torch.arange(len(batch["y"]))}

    def run(self, tower):
        z, at = self.model(tower.batch["x"]), tower.batch["at"]
        memory = self.keep("memory", lambda: torch.zeros(64, 3))
        loss = F.cross_entropy(z + memory[at], tower.batch["y"])
        memory[at] = z.detach()
        tower.backward(loss)


class LastOfSeveral(Program):
    """Rows are tensors of different sizes."""

    def batch(self, step):
        batch = super().batch(step)
        rows = [row[: 3 + index % 4] for index, row in enumerate(batch["x"])]
        return batch | {"x": np.fromiter(rows, object)}

    def run(self, tower):
        rows = [F.pad(row, (0, 6 - len(row))) for row in tower.batch["x"]]
        last, self.last = self.keep("last", lambda: rows[0]), rows[-1]
        tower.backward(F.cross_entropy(self.model(torch.stack(rows) - last), tower.batch["y"]))


class ListOfOutputs(Program):
    def loss(self, x, y):
        z = self.model(x)
        kept = self.keep("kept", list)
        kept.append(z.detach())
        return F.cross_entropy(z, y) + (z @ torch.cat(kept[-2:]).t()).square().mean()


class MaskDrawnOnce(Program):
    def loss(self, x, y):
        mask = self.keep("mask", lambda: torch.rand(3) > 0.5)
        return F.cross_entropy(self.model(x) * mask, y)


class MixedWithTheLastRows(Program):
    def loss(self, x, y):
        last, self.last = self.keep("last", lambda: x), x
        rows = min(len(x), len(last))
        return F.cross_entropy(self.model(0.7 * x[:rows] + 0.3 * last[:rows]), y[:rows])


class SparseMatrixOfTheFirstRows(Program):
    def loss(self, x, y):
        sparse = self.keep("sparse", lambda: x.relu().to_sparse().sum(0).to_sparse())
        return F.cross_entropy(self.model(x - sparse.to_dense()), y)


class CompressedMatrixOfTheFirstRows(Program):
    def loss(self, x, y):
        compressed = self.keep("compressed", lambda: (x.t() @ x).to_sparse_csr())
        return F.cross_entropy(self.model(x @ compressed.to_dense()), y)


@torch.library.custom_op("samestep_tests::add_to", mutates_args={"total"})
def add_to(total: torch.Tensor, values: torch.Tensor) -> None:
    total.numpy()[...] += values.numpy()


class OperatorOfItsOwn(Program):
    def loss(self, x, y):
        z, total = self.model(x), self.keep("total", lambda: torch.zeros(3))
        loss = F.cross_entropy(z - total.clone(), y)
        add_to(total, z.detach().mean(0))
        return loss


class Attention(Program):
    """The state comes from an operator that takes a function."""

    def loss(self, x, y):
        z, last = self.model(x), self.keep("last", lambda: torch.zeros(1, 3))
        query = z.detach()[None, None]
        self.last = flex_attention(query, query, query, lambda score, *_: 2 * score)[0, 0]
        return F.cross_entropy(z - last.mean(0), y)


class ScaleOfTheFirstRows(Program):
    def loss(self, x, y):
        scale = self.keep("scale", lambda: x.std())
        return F.cross_entropy(self.model(x / scale), y)


class NetDrawnInAPass(Program):
    def loss(self, x, y):
        target = self.keep("target", lambda: nn.Linear(6, 3).requires_grad_(False))
        return F.mse_loss(self.model(x), target(x))


class LazyNet(Program):
    def build(self):
        self.target = nn.LazyLinear(3)
        return net()

    def loss(self, x, y):
        with torch.no_grad():
            target = self.target(x)
        return F.mse_loss(self.model(x), target)


class NetThatLearnsInPasses(Program):
    def build(self):
        self.critic = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.critic.parameters())
        return net()

    def loss(self, x, y):
        z = self.model(x)
        self.critic(z.detach()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(self.critic(z).mean(), z)
        return (gradient.detach() * z).mean()


class OptimizerThatKeepsMoments(Program):
    """Each pass resets the weights, but not the optimizer's moments."""

    def build(self):
        self.quick = net()
        self.optimizer = torch.optim.Adam(self.quick.parameters())
        return net()

    def loss(self, x, y):
        self.quick.load_state_dict(self.model.state_dict())
        self.optimizer.zero_grad()
        F.cross_entropy(self.quick(x), y).backward()
        self.optimizer.step()
        return F.mse_loss(self.model(x), self.quick(x).detach())


class GradientsThatAddUp(Program):
    """Each pass resets the weights, but not the gradients of the previous passes."""

    def build(self):
        self.quick = net()
        return net()

    def loss(self, x, y):
        self.quick.load_state_dict(self.model.state_dict())
        F.cross_entropy(self.quick(x), y).backward()
        torch.optim.SGD(self.quick.parameters(), 0.1).step()
        return F.mse_loss(self.model(x), self.quick(x).detach())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    "program",
    [
        HiddenState,
        RunningMean,
        RunningMeanInPlace,
        RunningMeanInBuffer,
        MemoryBank,
        MemoryOfLabels,
        Histogram,
        LastOfSeveral,
        MemoryOfExamples,
        ListOfOutputs,
        MaskDrawnOnce,
        MixedWithTheLastRows,
        SparseMatrixOfTheFirstRows,
        CompressedMatrixOfTheFirstRows,
        OperatorOfItsOwn,
        pytest.param(Attention, marks=pytest.mark.long),
        ScaleOfTheFirstRows,
        NetDrawnInAPass,
        LazyNet,
        NetThatLearnsInPasses,
        OptimizerThatKeepsMoments,
        GradientsThatAddUp,
    ],
)
def test_state_that_affects_another_towers_loss_is_an_error(program, num_workers):
    texts = errors(program, num_workers)
    assert all("step 0, tower" in text and DEPENDS in text for text in texts)
    assert all("a tensor of shape" in text and "after average()" in text for text in texts)


def drawing(draw):
    """Return a program in which all passes draw from the same generator, without seeding it."""

    class Drawing(Program):
        def loss(self, x, y):
            return super().loss(draw(x, self.keep("own", torch.Generator)), y)

    return Drawing


DRAWS = {
    "randn": lambda x, own: x + torch.randn(x.shape, generator=own),
    "randint": lambda x, own: x * torch.randint(0, 3, (len(x), 1), generator=own),
    "randperm": lambda x, own: x[torch.randperm(len(x), generator=own)],
    "bernoulli": lambda x, own: x * torch.bernoulli(torch.full(x.shape, 0.5), generator=own),
    "normal_": lambda x, own: x + torch.empty(x.shape).normal_(generator=own),
    "multinomial": lambda x, own: x[torch.multinomial(torch.ones(len(x)), 2, generator=own)].repeat(9, 1)[
        : len(x)
    ],
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_torch_generator_that_continues_from_tower_to_tower_is_an_error(draw, num_workers):
    for text in errors(drawing(draw), num_workers):
        assert "step 0, tower" in text
        assert DEPENDS in text
        assert (
            "through a torch.Generator (own of self) that continues from that tower's draws; seed it in each "
            "pass from the step"
        ) in text


def test_a_torch_generator_of_a_module_is_a_warning_and_then_an_error():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.Generator()

        def forward(self, x):
            return x + torch.randn(x.shape, generator=self.own)

    class Noisy(Program):
        def build(self):
            return nn.Sequential(Noise(), net())

    with (
        pytest.warns(UserWarning, match="a pass drew from own of 0"),
        pytest.raises(
            samestep.UsageError, match=r"tower 0, through a torch\.Generator that continues from that"
        ),
    ):
        Noisy(samestep.init("cpu"))


USES = {
    "item": lambda x, own: x * torch.rand(1, generator=own).item(),
    "if": lambda x, own: 2 * x if torch.rand(1, generator=own) < 0.5 else x,
    "tolist": lambda x, own: x[torch.randperm(len(x), generator=own).tolist()],
    "for others": lambda x, own: x[: len(torch.randperm(len(x), generator=own))],
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_generator_that_continues_is_a_warning_where_its_numbers_cannot_be_followed(use, num_workers):
    with pytest.warns(UserWarning, match=r"from a torch\.Generator \(own of self\) that continues") as caught:
        simulate(drawing(use), num_workers)
    assert len(caught) <= num_workers  # at most once on each worker


# ---- weights that are not part of the model --------------------------------------------------------


class AverageOfWeights(Program):
    def build(self):
        model = net()
        self.average = copy.deepcopy(model)
        return model

    def run(self, tower):
        super().run(tower)
        with torch.no_grad():
            for p, q in zip(self.average.parameters(), self.model.parameters(), strict=True):
                self.follow(p, q)

    def follow(self, p, q):
        p.lerp_(q, 0.1)


class AverageByData(AverageOfWeights):
    def follow(self, p, q):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)


class AverageInTensors(AverageOfWeights):
    def build(self):
        model = net()
        self.shadow = [p.detach().clone() for p in model.parameters()]
        return model

    def run(self, tower):
        Program.run(self, tower)
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.model.parameters()], 0.1)


class AveragedModel(Program):
    def run(self, tower):
        average = self.keep("average", lambda: torch.optim.swa_utils.AveragedModel(self.model))
        super().run(tower)
        average.update_parameters(self.model)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [AverageOfWeights, AverageByData, AverageInTensors, AveragedModel])
def test_weights_outside_the_model_that_several_passes_update_are_an_error(program, num_workers):
    texts = errors(program, num_workers)
    assert all("that is not part of the model" in text and "after average()" in text for text in texts)


class AverageInNewTensors(AverageOfWeights):
    def follow(self, p, q):
        p.data = 0.9 * p.data + 0.1 * q.data


class Shadow(Program):
    def run(self, tower):
        shadow = self.keep("shadow", lambda: {name: p.clone() for name, p in self.model.named_parameters()})
        super().run(tower)
        for name, p in self.model.named_parameters():
            new = 0.1 * p.data + 0.9 * shadow[name]
            shadow[name] = new.clone()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("program", [AverageInNewTensors, Shadow])
def test_so_are_averages_of_weights_in_new_tensors(program, num_workers):
    texts = errors(program, num_workers)
    assert all("that is not part of the model" in text and "after average()" in text for text in texts)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_teacher_that_passes_update_is_an_error(num_workers):
    class Teacher(AverageOfWeights):
        def loss(self, x, y):
            return F.mse_loss(self.model(x), self.average(x).detach())

    assert all(DEPENDS in text for text in errors(Teacher, num_workers))


# ---- harmless state --------------------------------------------------------------------------------


class Logs(Program):
    def loss(self, x, y):
        z = self.model(x)
        loss = F.cross_entropy(z, y)
        self.total = self.keep("total", lambda: torch.zeros(())) + loss.detach()
        self.keep("outputs", list).append(z.detach())
        self.confusion = self.keep("confusion", lambda: torch.zeros(3, 3))
        self.confusion.index_put_((y, z.argmax(1)), torch.ones(()), accumulate=True)
        assert torch.isfinite(torch.cat(self.outputs)).all()
        return loss


class OfWeights(Program):
    """Norms of weights, for the log, and a copy of weights that is made once."""

    def loss(self, x, y):
        norms = torch.stack([p.detach().norm() for p in self.model.parameters()] * 2)  # as many as biases
        self.norms = self.keep("norms", lambda: torch.zeros(8)) + norms
        weight = self.model[0].weight
        first = self.keep("first", weight.detach().clone)
        self.moved = (first - weight.detach()).abs()
        self.most = max(self.keep("most", lambda: torch.zeros(())), self.moved.max())
        return F.cross_entropy(self.model(x), y)


class Scratch(Program):
    """Memory that each pass overwrites, with different numbers of rows."""

    def loss(self, x, y):
        memory = self.keep("memory", lambda: torch.zeros(8, 3))[: len(x)]
        with torch.no_grad():
            memory.copy_(self.model(x))
        out = self.keep("out", lambda: torch.zeros(8, 3))
        torch.mul(memory, 2, out=out[: len(x)])
        return F.cross_entropy(self.model(x) + out[: len(x)], y)


class CacheOfKeys(Program):
    """Memory that each pass overwrites, one column at a time."""

    def loss(self, x, y):
        keys = self.keep("keys", lambda: torch.zeros(8, 6, 3))
        with torch.no_grad():
            for column in range(6):
                keys[: len(x), column] = self.model(x.roll(column, 1))
        return F.cross_entropy(self.model(x) + keys[: len(x)].mean(1), y)


class CacheByIndex(Program):
    """Memory that each pass overwrites by row indices, like a decoder's cache."""

    write = staticmethod(lambda memory, rows, values: memory.index_copy_(0, rows, values))

    def loss(self, x, y):
        memory, rows = self.keep("memory", lambda: torch.zeros(64, 3)), torch.randperm(len(x))
        with torch.no_grad():
            self.write(memory, rows, self.model(x))
        return F.cross_entropy(self.model(x) + memory[: len(x)], y)


class CacheByIndexing(CacheByIndex):
    write = staticmethod(lambda memory, rows, values: memory.__setitem__(rows, values))


class CacheByScattering(CacheByIndex):
    write = staticmethod(lambda memory, rows, values: memory.scatter_(0, rows[:, None].expand(-1, 3), values))


class CacheByMask(CacheByIndex):
    @staticmethod
    def write(memory, rows, values):
        memory.masked_scatter_(torch.zeros(64, 1).index_fill_(0, rows, 1) > 0, values)


class NestedRows(Program):
    def loss(self, x, y):
        ragged = torch.nested.nested_tensor(list(x), layout=torch.jagged)
        return F.cross_entropy(self.model(torch.nested.to_padded_tensor(ragged, 0.0)), y)


class WholeTensor(Program):
    """State made of a tensor that every tower gets whole."""

    def batch(self, step):
        return super().batch(step) | {"scale": samestep.Whole(torch.ones(3))}  # as many as a tower has rows

    def run(self, tower):
        scale = self.keep("scale", lambda: tower.batch["scale"] * 2)
        tower.backward(F.cross_entropy(self.model(tower.batch["x"]) * scale, tower.batch["y"]))


class Positions(Program):
    """A cache of values that depend only on sizes."""

    def loss(self, x, y):
        places = self.keep("places", lambda: torch.arange(6.0).sin() + torch.zeros_like(x[0]))
        return F.cross_entropy(self.model(x + places), y)


class SeededNoise(Program):
    """A kept generator that each pass seeds, and a generator that each pass creates."""

    def run(self, tower):
        x, own = tower.batch["x"], self.keep("own", torch.Generator)
        own.manual_seed(tower.index)
        made = torch.Generator().manual_seed(tower.index)
        noise = torch.randn(x.shape, generator=own) + torch.empty_like(x).uniform_(generator=own)
        tower.backward(self.loss(x + noise * torch.randn(x.shape, generator=made), tower.batch["y"]))


class NewNoise(Program):
    """Each pass draws new random numbers into the same memory."""

    def loss(self, x, y):
        noise = self.keep("noise", lambda: torch.empty(6)).normal_()
        return F.cross_entropy(self.model(F.dropout(x + noise, 0.1)), y)


class OwnSlots(Program):
    """State that each tower keeps for itself from step to step."""

    def run(self, tower):
        slots = self.keep("slots", lambda: torch.zeros(self.num_towers, 3))
        z = self.model(tower.batch["x"]) + slots[tower.index]
        slots[tower.index] = z.detach().mean(0)
        tower.backward(F.cross_entropy(z, tower.batch["y"]))


class CopyThatLearns(Program):
    def loss(self, x, y):
        quick = copy.deepcopy(self.model)
        optimizer = torch.optim.Adam(quick.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(quick(x), y).backward()
            optimizer.step()
        return F.mse_loss(self.model(x), quick(x).detach())


class NetResetInEachPass(Program):
    def build(self):
        self.quick = net()
        return net()

    def loss(self, x, y):
        self.quick.load_state_dict(self.model.state_dict())
        self.quick.zero_grad()
        F.cross_entropy(self.quick(x), y).backward()
        torch.optim.SGD(self.quick.parameters(), 0.1).step()
        return F.mse_loss(self.model(x), self.quick(x).detach())


class NetDrawnInEachPass(Program):
    def build(self):
        self.target = nn.Linear(6, 3).requires_grad_(False)
        return net()

    def loss(self, x, y):
        self.target.reset_parameters()
        return F.mse_loss(self.model(x), self.target(x))


class AdversarialRows(Program):
    def loss(self, x, y):
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(self.model(x), y), x)
        return F.cross_entropy(self.model((x + 0.1 * gradient.sign()).detach()), y)


class PerExampleGradients(Program):
    def loss(self, x, y):
        weights = {name: p.detach() for name, p in self.model.named_parameters()}

        def of(weights, x, y):
            return F.cross_entropy(torch.func.functional_call(self.model, weights, (x[None],)), y[None])

        norms = torch.func.vmap(torch.func.grad(of), (None, 0, 0))(weights, x, y)
        scale = torch.stack([g.flatten(1).norm(dim=1) for g in norms.values()]).sum(0)
        return (F.cross_entropy(self.model(x), y, reduction="none") / (1 + scale)).mean()


class CountedOperators(Program):
    def loss(self, x, y):
        with FlopCounterMode(display=False):
            return super().loss(x, y)


class OutputsOfBefore(Program):
    """A value computed between steps from the whole batch, the same on all workers."""

    def batch(self, step):
        with torch.no_grad():
            batch = batch_of(step, 21 - step % 3)
            self.center = self.model(batch["x"]).mean(0)
        return batch

    def loss(self, x, y):
        return F.cross_entropy(self.model(x) - self.center, y)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 2, 7])
@pytest.mark.parametrize(
    "program",
    [
        Logs,
        OfWeights,
        Scratch,
        CacheByIndex,
        CacheByScattering,
        NestedRows,
        WholeTensor,
        Positions,
        SeededNoise,
        OwnSlots,
        NetResetInEachPass,
        CountedOperators,
        OutputsOfBefore,
        Program,
        CacheOfKeys,
        CacheByIndexing,
        CacheByMask,
        NewNoise,
        CopyThatLearns,
        NetDrawnInEachPass,
        AdversarialRows,
        PerExampleGradients,
    ],
)
def test_harmless_state_is_allowed(program, num_workers):
    digests = {p.digest for num in (1, num_workers) for p in values(program, num, num)}
    assert len(digests) == 1


# ---- placements, and the dispatch mode -------------------------------------------------------------


def test_state_kept_from_step_to_step_is_an_error_once_a_worker_has_several_towers():
    """On four workers each tower has its own state, which is a warning; on three, two towers share one."""

    def program(job):
        model, state = net(), {}
        towers = Towers(model, 4, job=job)
        for step in range(2):
            for tower in towers(batch_of(step, 8)):
                z = model(tower.batch["x"]) + state.get("mean", 0)
                state["mean"] = z.detach().mean(0)
                tower.backward(F.cross_entropy(z, tower.batch["y"]))
            towers.average()

    with pytest.warns(UserWarning, match="losses depend on mean of state"):
        assert all(outcome.error is None for outcome in simulate(program, 4))
    assert all(DEPENDS in outcome.text for outcome in simulate(program, 3))


def test_a_mode_that_a_pass_leaves_open_is_not_closed_for_it():
    model = net()
    towers = Towers(model, 3)
    counter = FlopCounterMode(display=False)
    for tower in towers(batch_of(0)):
        if tower.index == 0:
            counter.__enter__()
        tower.backward(loss_of(model, tower.batch))
    counter.__exit__(None, None, None)
    towers.average()
    assert counter.get_total_flops() > 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("leave", ["break", "raise"])
def test_a_step_that_is_left_leaves_no_mode_behind(leave):
    model = net()
    towers = Towers(model, 3)
    try:
        for _ in towers(batch_of(0)):
            if leave == "raise":
                raise ValueError
            break
    except ValueError:
        pass
    towers.abandon()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


# ---- passes in other threads -----------------------------------------------------------------------


class InThreads(Program):
    """Threads that run passes, with a backward of the program's own, and other things afterwards."""

    def __init__(self, job):
        with ThreadPoolExecutor(1) as self.pool:
            super().__init__(job)
            self.mode = self.pool.submit(_get_current_dispatch_mode).result()

    def run(self, tower):
        self.pool.submit(super().run, tower).result()

    def loss(self, x, y):
        z = self.model(x)
        z.register_hook(lambda gradient: gradient * 2)
        return F.cross_entropy(z, y)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_operators_of_other_threads_are_not_followed(num_workers):
    outcomes = simulate(InThreads, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert [outcome.value.mode for outcome in outcomes] == [None] * num_workers
    assert len({outcome.value.digest for outcome in outcomes}) == 1
