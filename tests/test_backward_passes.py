"""What runs in backward (custom functions, hooks) and depends on other towers' passes, or on their count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep

from .cases import mostly_long
from .nets import unseen_count
from .test_flow import Program, errors
from .test_pass_operators import ANOTHER_WAY, warnings_of

pytestmark = pytest.mark.sampled

OTHER_GRADIENTS = ANOTHER_WAY.replace("loss was", "gradients were").replace("that", "those")
WORKERS = mostly_long([3, 1, 2], 1)


class OwnBackward(Program):
    """A layer whose backward is the method `change` of the program."""

    def build(self):
        change = lambda gradient: self.change(gradient)  # noqa: E731 - reads the method at each call

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                return change(gradient)

        self.layer = Layer.apply
        return nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 3)])

    def loss(self, x, y):
        return F.cross_entropy(self.model[1](self.layer(self.model[0](x))), y)

    def change(self, gradient):
        return gradient


# ---- wrong -----------------------------------------------------------------------------------------


class RunningNorm(OwnBackward):
    def change(self, gradient):
        self.norm = 0.9 * self.keep("norm", lambda: torch.ones(())) + 0.1 * gradient.norm()
        return gradient / self.norm


class RunningNormOfAHook(Program):
    """A hook keeps state, and another one uses it."""

    def build(self):
        self.norms = {}
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        model[2].register_full_backward_hook(self.note)
        model[1].register_full_backward_pre_hook(lambda layer, given: (given[0] * self.norms["last"],))
        return model

    def note(self, layer, gradients, given):
        self.norms["last"] = self.norms.get("last", 1) * 0.9 + given[0].norm()


class GradientOfThePassBefore(OwnBackward):
    def change(self, gradient):
        mixed = gradient if not hasattr(self, "last") else gradient + 0.1 * self.last.mean(0)
        self.last = gradient
        return mixed


class OwnNoise(OwnBackward):
    def change(self, gradient):
        generator = self.keep("generator", lambda: torch.Generator().manual_seed(1))
        return gradient + torch.randn(gradient.shape, generator=generator)


class OwnNumber(OwnBackward):
    """That Python reads, so that no gradient shows where it comes from."""

    def change(self, gradient):
        generator = self.keep("generator", lambda: torch.Generator().manual_seed(1))
        return gradient * (1 + torch.rand((), generator=generator).item())


@pytest.mark.long
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_number_that_continues_another_passs_draws_is_told_of_once_on_each_worker(num_workers):
    told, _ = warnings_of(OwnNumber, num_workers)
    assert len(told) == num_workers
    assert all("drew from a torch.Generator (generator of self) that continues" in each for each in told)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [RunningNorm, RunningNormOfAHook, GradientOfThePassBefore, OwnNoise])
def test_gradients_that_depend_on_another_pass_are_an_error(program, num_workers):
    through = "a torch.Generator" if program is OwnNoise else "a tensor of shape ["
    for text in errors(program, num_workers):
        assert ": its gradients depend on rows or random numbers of tower " in text
        assert f", through {through}" in text


def whole_batch(job):
    """A step whose loss is not a sum over rows, with state in backward."""
    model = nn.Linear(6, 5)
    towers = samestep.Towers(model, 4, job=job)
    norm = torch.ones(())

    def change(gradient):
        nonlocal norm
        norm = 0.9 * norm + gradient.norm()
        return gradient / norm

    def forward(batch):
        outputs = model(batch)
        if outputs.requires_grad:
            outputs.register_hook(change)
        return outputs

    towers.whole_batch(
        torch.randn(12, 6), forward, lambda outputs, batch: torch.cdist(outputs, outputs).mean()
    )
    towers.average()


@pytest.mark.parametrize("num_workers", [2, 1])
def test_gradients_of_a_whole_batch_that_depend_on_another_pass_are_an_error(num_workers):
    assert all(": its gradients depend on rows or" in text for text in errors(whole_batch, num_workers))


class ReversedByCount(OwnBackward):
    """A gradient that is reversed, ever more strongly."""

    def build(self):
        self.passes = unseen_count(1)
        return super().build()

    def change(self, gradient):
        return -gradient * (1 - 0.97 ** self.passes())


class EveryOtherHook(Program):
    num_passes = 0

    def loss(self, x, y):
        self.num_passes += 1
        outputs = self.model(x)
        if self.num_passes % 2:
            outputs.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return F.cross_entropy(outputs, y)


class SeededByCount(OwnBackward):
    num_passes = 0

    def change(self, gradient):
        self.num_passes += 1
        torch.manual_seed(self.num_passes)
        return F.dropout(gradient, 0.2)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", [ReversedByCount, EveryOtherHook, SeededByCount])
def test_gradients_that_depend_on_a_count_of_passes_are_told_of_once_on_each_worker(program, num_workers):
    told, _ = warnings_of(program, num_workers)
    found = [each for each in told if OTHER_GRADIENTS in each]
    assert len(found) == num_workers
    assert all("in test_backward_passes.py, line " in each for each in found)


class Annealed(OwnBackward):
    """Uses a number, and lowers it: it has read values, so that passes are not compared."""

    strength = 1.0

    def change(self, gradient):
        changed = gradient * self.strength
        self.strength *= 1 - 0.1 * gradient.norm().item()
        return changed


@pytest.mark.long
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_number_that_another_backward_has_left_is_named(num_workers):
    told, _ = warnings_of(Annealed, num_workers)
    found = [
        each for each in told if "its gradients depend on strength of self, which each pass computes" in each
    ]
    assert len(found) == num_workers


# ---- right -----------------------------------------------------------------------------------------


class Logged(RunningNorm):
    """A running norm that no gradient uses."""

    def change(self, gradient):
        super().change(gradient)
        return gradient


class LoggedInEveryOther(OwnBackward):
    """Reads values in a way that no operator shows, in some passes only."""

    num_passes = 0

    def change(self, gradient):
        self.num_passes += 1
        if self.num_passes % 2:
            self.log = gradient.tolist()
        return gradient


class GlobalNoise(OwnBackward):
    def change(self, gradient):
        return gradient + torch.randn_like(gradient) * gradient.std()


class ByItsValues(OwnBackward):
    """Reads values in Python, more of them in some passes."""

    def change(self, gradient):
        norm = gradient.norm()
        while norm > 0.05:
            gradient = gradient / 2
            norm = gradient.norm()
        return gradient


class ByTheStep(OwnBackward):
    num_steps = 0

    def run(self, tower):
        self.strength = 1 - 0.9 ** (self.num_steps + 1)
        super().run(tower)

    def batch(self, step):
        self.num_steps = step
        return super().batch(step)

    def change(self, gradient):
        return -self.strength * gradient


class Recomputed(Program):
    def loss(self, x, y):
        return F.cross_entropy(checkpoint(lambda x: self.model(F.dropout(x, 0.2)), x, use_reentrant=False), y)


class RecomputedReentrantly(Program):
    def loss(self, x, y):
        outputs = checkpoint(lambda x: self.model(F.dropout(x, 0.2)), x.requires_grad_(), use_reentrant=True)
        return F.cross_entropy(outputs, y)


class Shared(Program):
    """Gradients that several nodes add up, in place or not."""

    def loss(self, x, y):
        outputs = self.model(x)
        return F.cross_entropy(outputs + outputs * outputs.sigmoid() + outputs.flip(1), y)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 1, 7])
@pytest.mark.parametrize(
    "program",
    [
        *(OwnBackward, Logged, LoggedInEveryOther, GlobalNoise, ByItsValues, ByTheStep, Recomputed),
        *(RecomputedReentrantly, Shared),
    ],
)
def test_other_backwards_give_no_warning(program, num_workers):
    told, found = warnings_of(program, num_workers)
    assert told == []
    assert found == warnings_of(program, 2)[1]
