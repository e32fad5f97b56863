"""Programs that people write, checked with stand-ins: what is found, and what is named."""

import collections
import copy
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.checking.examination import Examination, Plan
from samestep.checking.surroundings import Surroundings

from . import planted
from .cases import mostly_long

CALLS = []
SEEN = {}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def check(build, rows=20, workers=(2,), **options):
    def seeded():
        torch.manual_seed(0)
        return build()

    return samestep.check(
        seeded, planted.batch(rows), 4, workers=workers, processes=False, steps=2, device="cpu", **options
    )


def finding_of(build, **options):
    result = check(build, **options)
    assert not result.same, str(result)
    assert result.notes == []
    return result.finding


def network(middle):
    return nn.Sequential(nn.Linear(5, 6), middle, nn.ReLU(), nn.Linear(6, 4))


def sgd(*modules, lr=0.1):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr)


# ---- parameters that a pass writes to ----------------------------------------------------------------


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 5, max_norm=0.5)
        self.last = nn.Linear(5, 4)

    def forward(self, batch):
        return self.last(self.table(batch["y"]) + batch["x"])


class MomentumEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(5, 4), nn.Linear(5, 4).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.lerp_(query, 0.01)

    def forward(self, x):
        self.follow()
        return self.query(x) + self.key(x)


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))
        self.has_begun = False

    def forward(self, x):
        if not self.has_begun:
            self.bias.data = -x.detach().mean(0)
            self.has_begun = True
        return x + self.bias


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        self.scale.data.clamp_(0, 0.999)
        return x * self.scale


class MadeInForward(nn.Module):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(6))
        return x * self.scale


@pytest.mark.parametrize(
    ("build", "module", "operator", "parameter"),
    mostly_long(
        [
            (
                lambda: (Clipped(), lambda model, batch: F.cross_entropy(model(batch), batch["y"])),
                "table (Embedding)",
                "aten.embedding_renorm_.default, forward",
                "table.weight",
            ),
            (
                lambda: (MomentumEncoder(), planted.loss_of),
                "the model (MomentumEncoder)",
                "aten.lerp_.Scalar, forward",
                "key.weight",
            ),
            (lambda: (network(ActNorm()), planted.loss_of), "1 (ActNorm)", None, "1.bias"),
            (
                lambda: (network(Clamped()), planted.loss_of),
                "1 (Clamped)",
                "aten.clamp_.default, forward",
                "1.scale",
            ),
            (lambda: (network(MadeInForward()), planted.loss_of), "1 (MadeInForward)", None, "1.scale"),
            (
                lambda: (torch.compile(network(Clamped()), backend="eager"), planted.loss_of),
                "1 (Clamped)",
                "aten.clamp_.default, forward",
                "1.scale",
            ),
        ],
        4,
    ),
)
def test_a_parameter_that_a_pass_writes_to(build, module, operator, parameter):
    finding = finding_of(build)
    assert finding.what == "not the same bits: the pass of step 0, tower 0 writes to a parameter"
    assert (finding.module, finding.operator, finding.parameter) == (module, operator, parameter)


def test_a_parameter_that_a_backward_writes_to():
    def build():
        model = network(nn.Tanh())

        def shrink(module, *_):
            module.weight.data.mul_(0.99)

        model[3].register_full_backward_hook(shrink)
        return model, planted.loss_of

    finding = finding_of(build)
    assert (finding.operator, finding.parameter) == ("aten.mul_.Tensor, backward", "3.weight")


# ---- what lies outside the model ---------------------------------------------------------------------


def with_temperature():
    model, temperature = network(nn.Tanh()), nn.Parameter(torch.tensor(1.0))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["x"]) * temperature, batch["y"])

    return model, loss_of, torch.optim.SGD([*model.parameters(), temperature], lr=0.1)


def with_head():
    model, head = nn.Linear(5, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 4))

    def loss_of(model, batch):
        return F.cross_entropy(head(model(batch["x"])), batch["y"])

    return model, loss_of, sgd(model, head)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, model, batch):
        return F.cross_entropy(model(batch["x"]) * self.scale, batch["y"])


def with_criterion():
    model, criterion = network(nn.Tanh()), Criterion()
    return model, criterion, sgd(model, criterion)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (with_temperature, "temperature of the function around with_temperature.<locals>.loss_of"),
        (with_head, "weight of head.1 (Linear) of the function around with_head.<locals>.loss_of"),
        (with_criterion, "scale of the loss function (Criterion)"),
    ],
)
def test_a_parameter_outside_the_model(build, name):
    finding = finding_of(build)
    assert finding.what == "cannot train: the optimizer updates tensors that are not parameters of the model"
    assert (finding.module, finding.parameter) == ("the optimizer", name)
    assert f"gradients are not averaged for {name}" in finding.cause


class Adversary:
    """Trains a discriminator inside the loss."""

    def __init__(self):
        self.judge = nn.Linear(4, 1)
        self.optimizer = sgd(self.judge)

    def loss(self, model, batch):
        scores = model(batch["x"])
        self.optimizer.zero_grad()
        self.judge(scores.detach()).square().mean().backward()
        self.optimizer.step()
        return F.cross_entropy(scores, batch["y"]) - self.judge(scores).mean()


class Student(nn.Module):
    """Hides its teacher from `parameters()` in a list, as many do."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(5, 4)
        self.teacher = [copy.deepcopy(self.student)]

    @torch.no_grad()
    def teach(self, x):
        for own, theirs in zip(self.student.parameters(), self.teacher[0].parameters(), strict=True):
            theirs.lerp_(own + 0.01, 0.1)
        return self.teacher[0](x)

    def forward(self, x):
        return self.student(x) - self.teach(x)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = collections.deque(maxlen=3)

    def forward(self, x):
        result = x + sum(self.last, torch.zeros(()))
        self.last.append(x.detach().mean(0))
        return result


class Cached(nn.Module):
    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.rand(6)
        return x * self.mask


def with_history():
    model, norms = network(nn.Tanh()), []

    def scaled(gradient):
        norms.append(gradient.norm().item())
        return gradient / max(norms)

    model[0].weight.register_hook(scaled)
    return model, planted.loss_of


def with_norm():
    model, norm, head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def loss_of(model, batch):
        hidden = model(batch["x"])
        norm(hidden.detach())
        shifted = hidden - norm.running_mean
        return F.cross_entropy(head(shifted), batch["y"])

    return model, loss_of


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:a hook on 0.weight sees")
@pytest.mark.parametrize(
    ("build", "cause"),
    mostly_long(
        [
            (
                lambda: (nn.Linear(5, 4), Adversary().loss),
                "weight of judge (Linear) of the loss function is a tensor that carries over from one tower",
            ),
            (
                lambda: (Student(), planted.loss_of),
                "weight of teacher (Linear) of the model (Student) is a tensor that carries over from one "
                "tower",
            ),
            (
                lambda: (network(Memory()), planted.loss_of),
                "last of 1 (Memory) is a tensor that carries over",
            ),
            (
                lambda: (network(Cached()), planted.loss_of),
                "mask of 1 (Cached) is a tensor that carries over",
            ),
            (
                with_history,
                "norms of the function around with_history.<locals>.scaled is kept from tower to tower",
            ),
        ],
        3,
    ),
)
def test_state_that_towers_leave_to_each_other(build, cause):
    assert finding_of(build).cause.startswith(cause)


def test_a_norm_outside_the_model():
    finding = finding_of(with_norm)
    assert "norm (BatchNorm1d) of the function around with_norm.<locals>.loss_of" in str(finding)
    assert "running_mean" in str(finding)


@pytest.mark.long
def test_a_teacher_that_follows_between_steps_keeps_the_promise():
    def build():
        model = network(nn.Dropout())
        teacher, optimizer = copy.deepcopy(model), sgd(model)

        @torch.no_grad()
        def follow(*_):
            for own, theirs in zip(model.parameters(), teacher.parameters(), strict=True):
                theirs.lerp_(own, 0.1)

        def loss_of(model, batch):
            target = teacher(batch["x"]).detach()
            return planted.loss_of(model, batch) + (model(batch["x"]) - target).square().mean()

        optimizer.register_step_post_hook(follow)
        return model, loss_of, optimizer

    assert check(build).same


# ---- updates -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_learning_rate_that_is_drawn():
    def build():
        model = network(nn.Tanh())
        return model, planted.loss_of, sgd(model, lr=torch.rand(1, generator=unseeded()).item())

    finding = finding_of(build)
    assert finding.what.endswith("two runs of one worker differ first in step 0, update")
    assert "lr of group 0 of the optimizer differs from the start: it is 0." in finding.cause


def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator


def test_a_schedule_that_counts_passes():
    def build():
        model = network(planted.HarmlessCounter())

        class Slower(torch.optim.SGD):
            def step(self, closure=None):
                self.param_groups[0]["lr"] = 0.1 / model[1].calls
                return super().step(closure)

        return model, planted.loss_of, Slower(model.parameters(), lr=0.1)

    cause = finding_of(build).cause
    assert "calls of 1 (HarmlessCounter) differs after the passes" in cause
    assert cause.endswith("it is 4 on one worker and 2 on 2 workers")


def test_an_edit_on_one_worker_only():
    def subject(job):
        torch.manual_seed(0)
        model = network(nn.Tanh())
        optimizer = sgd(model)
        if job.rank == 1:
            optimizer.register_step_post_hook(lambda *_: model[0].weight.data.mul_(0.9))
        towers = samestep.Towers(model, 4, job=job)
        return samestep.Step(towers, planted.loss_of, optimizer), iter([planted.batch()] * 2)

    finding = Examination(subject, Plan(2, (2,), processes=False, device="cpu", threads=1)).run()
    assert finding.what == "not the same bits: one worker and 2 workers differ first in step 0, update"
    assert (finding.module, finding.parameter) == ("the optimizer", "0.weight")


def test_weights_that_stay_as_they_are_are_noted():
    def build():
        model = network(nn.Tanh())
        return model, planted.loss_of, sgd(model, lr=0.0)

    assert "no weight has changed in these steps, so no update was checked" in check(build).notes


# ---- causes that are none, and what stand-ins share --------------------------------------------------


class Constant(nn.Module):
    calls = 0

    def forward(self, x):
        return x


def test_names_that_python_gives_are_no_state():
    model = network(Constant())
    held = Surroundings(model, planted.loss_of, sgd(model)).held
    assert ("the class Constant", "calls") in held
    assert [place for place in held if place.name.startswith("__")] == []


@pytest.mark.long
def test_a_global_counter():
    def loss_of(model, batch):
        CALLS.append(1)
        return planted.loss_of(model, batch) * (1 + len(CALLS) / 100)

    assert finding_of(lambda: (network(nn.Tanh()), loss_of)).cause.startswith(
        "CALLS of the Python module tests.test_check_programs is kept from tower to tower"
    )


def test_a_global_that_keeps_what_it_saw_first_is_noted():
    def loss_of(model, batch):
        return planted.loss_of(model, batch) * SEEN.setdefault("mean", batch["x"].mean())

    result = check(lambda: (network(nn.Tanh()), loss_of))
    assert result.same
    assert (
        result.notes[1]
        == "SEEN of the Python module tests.test_check_programs is changed by a pass, and stand-ins share it"
    )


def test_an_error_of_one_stand_in_is_raised():
    @cache
    def made():
        return []

    class Third(nn.Module):
        def forward(self, x):
            if len(made()) == 4:  # after two runs of one worker: stand-in 0 has built, too
                raise ZeroDivisionError("planted")
            return x

    def build():
        made().append(1)
        return network(Third()), planted.loss_of

    with pytest.raises(ZeroDivisionError, match="planted"):
        check(build)


# ---- torch.compile -----------------------------------------------------------------------------------


def compiled(backend):
    return torch.compile(network(nn.BatchNorm1d(6)), backend=backend), planted.loss_of


@pytest.mark.long
def test_code_that_is_compiled_again_is_noted():
    again = "torch.compile compiled again in step 0, tower 3: which code runs may depend on the shapes"
    assert [note[: len(again)] for note in check(lambda: compiled("eager"), rows=39).notes[1:]] == [again]
    assert len(check(lambda: compiled("eager")).notes) == 1


@pytest.mark.long
def test_code_that_is_compiled_for_the_shapes_that_a_worker_has_met():
    def by_history(graph, inputs):
        """Stand in for a compiler whose code for any shape gives other bits than that for one shape."""
        is_for_any_shape = any(isinstance(each, torch.SymInt) for each in inputs)

        def run(*values):
            results = graph(*values)
            return [value * (1 + 2**-20 * is_for_any_shape) for value in results]

        return run

    finding = finding_of(lambda: compiled(by_history), rows=39, workers=(3,))
    assert (
        "depends on the shapes that a worker has met before: it compiled again in step 0, tower 3"
        in finding.cause
    )
    assert finding.remedy == "compile with dynamic=False, or let T divide the batch"


@pytest.mark.long
def test_watching_leaves_torch_compile_on():
    flags = sys.modules["torch.utils._python_dispatch"]
    finding_of(lambda: (network(planted.Counter()), planted.loss_of), workers=(3,))
    assert not flags._is_in_torch_dispatch_mode


@pytest.mark.long
def test_what_is_trained_beside_the_model_comes_fourth():
    def build():
        torch.manual_seed(0)
        model, temperature = nn.Linear(5, 4), nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
        return model, lambda m, x: (m(x) * temperature.exp()).square().mean(), optimizer, temperature

    assert samestep.check(build, torch.randn(16, 5), towers=4, processes=False).same
