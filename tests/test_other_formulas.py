"""Derivatives that torch computes otherwise while samestep follows operators: steps have the same bits."""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep import Towers
from samestep.watching.passes.other_formulas import OtherFormulas

from .cases import mostly_long
from .simulation import values

pytestmark = pytest.mark.sampled

STEPS = 4


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def normed(layer):
    return nn.Sequential(nn.Linear(6, 16), layer, nn.Tanh(), nn.Linear(16, 6))


def grouped():
    return nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 6))


def determinants(y):
    return torch.linalg.det(y[:, :4].reshape(-1, 2, 2))


def with_penalty(reduce):
    """Return a loss of `reduce(outputs)` and its derivative by the inputs."""

    def loss(model, x):
        x = x.clone().requires_grad_()
        found = reduce(model(x))
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return found.square().mean() + slope.square().mean()

    return loss


def without_penalty(reduce):
    return lambda model, x: reduce(model(x)).square().mean()


def in_forward_mode(model, x):
    outputs, tangents = torch.func.jvp(model, (x,), (torch.randn_like(x),))
    return outputs.square().mean() + tangents.square().mean()


def with_dual_numbers(model, x):
    with fw.dual_level():
        outputs, tangents = fw.unpack_dual(model(fw.make_dual(x, torch.randn_like(x))))
        loss = F.mse_loss(outputs, torch.ones_like(outputs))
    return loss + tangents.square().mean()


def curvature(model, x):
    def trace(row):
        return torch.func.hessian(lambda v: model(v)[0])(row).diagonal().sum()

    return torch.func.vmap(trace)(x).square().mean()


def product(y):
    return y.sigmoid().prod(-1)


def filled(y):
    return y.masked_fill(y > 0, y.mean())


PROGRAMS = [
    (net, without_penalty(product)),
    (net, with_penalty(lambda y: y.sigmoid().cumprod(-1)[:, -1])),
    (lambda: normed(nn.LayerNorm(16)), in_forward_mode),
    (net, with_penalty(product)),
    (net, with_penalty(determinants)),
    (net, without_penalty(filled)),
    (lambda: normed(nn.LayerNorm(16)), with_dual_numbers),
    (lambda: normed(nn.BatchNorm1d(16)), with_dual_numbers),
    (grouped, in_forward_mode),
    (net, curvature),
]


def train(job, make, loss_of, path=None, resumes_at=None):
    def run_passes(model, towers, inputs):
        for tower in towers(inputs):
            tower.backward(loss_of(model, tower.batch))

    return take_steps(job, make, run_passes, path, resumes_at)


def take_steps(job, make, run_passes, path, resumes_at):
    torch.manual_seed(0)
    model = make()
    towers = Towers(model, 6, job=job)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    state = {"model": model, "towers": towers, "optimizer": optimizer}
    if resumes_at is not None:
        samestep.load(path, **state)
    while towers.step < STEPS:
        run_passes(model, towers, torch.randn(24, 6, generator=torch.Generator().manual_seed(towers.step)))
        towers.average()
        optimizer.step()
        if path is not None and towers.step == 2:
            samestep.save(path, **state)
    return samestep.digest(model)


def contrast(job, path=None, resumes_at=None):
    """Train by a loss of the whole batch; its passes run twice, and are followed the second time."""

    def run_passes(model, towers, inputs):
        def forward(x):
            return torch.cat(torch.func.jvp(model, (x,), (torch.randn_like(x),)), 1)

        towers.whole_batch(inputs, forward, loss)

    def loss(outputs, batch):
        near = F.normalize(outputs, dim=1)
        return F.cross_entropy(near @ near.T, torch.arange(len(near)).roll(1))

    return take_steps(job, lambda: normed(nn.LayerNorm(16)), run_passes, path, resumes_at)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_losses_of_the_whole_batch_have_the_same_bits(tmp_path):
    found = {*values(lambda job: contrast(job, path=tmp_path), 1), *values(contrast, 2), *values(contrast, 3)}
    found |= {*values(lambda job: contrast(job, resumes_at=2, path=tmp_path), 2)}
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:Tower.*compares rows", "ignore:.*torch.jit.script")
@pytest.mark.parametrize(("make", "loss_of"), mostly_long(PROGRAMS, 3))
def test_steps_have_the_same_bits_on_any_number_of_workers_and_after_a_resume(make, loss_of, tmp_path):
    found = {*values(lambda job: train(job, make, loss_of, tmp_path), 1)}
    for num_workers in (2, 3):
        found |= {*values(lambda job: train(job, make, loss_of), num_workers)}
    found |= {*values(lambda job: train(job, make, loss_of, tmp_path, resumes_at=2), 2)}
    assert len(found) == 1


class Seen(TorchDispatchMode):
    """Notes the operators of a forward, as `FlowWatch` does."""

    def __init__(self):
        super().__init__()
        self.formulas = OtherFormulas()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.formulas.note(func)
        return func(*args, **(kwargs or {}))


def along_rows(names):
    return {name: lambda x, name=name: getattr(torch, name)(x, -1) for name in names}


FUNCTIONS = {
    **{name: getattr(F, name) for name in ("gelu", "silu", "elu", "softplus", "normalize")},
    **{name: getattr(torch.linalg, name) for name in ("det", "inv", "svdvals", "cholesky")},
    **along_rows(["softmax", "logsumexp", "cumsum", "logcumsumexp", "var", "std", "amax", "prod", "cumprod"]),
    "norm": lambda x: x.norm(3, dim=0),
    "sort": lambda x: x.sort(-1).values,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x[None], 3),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(6), label_smoothing=0.1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.roll(1, 0)),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.mean()),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2),
    "interpolate": lambda x: F.interpolate(x[None, None], size=(5, 9), mode="bicubic"),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0, 1]), x[:3]),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(0.1 * x),
    "lstsq": lambda x: torch.linalg.lstsq(x, x[:, :2] + 1).solution,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "vander": lambda x: torch.linalg.vander(x[0], N=5),
}


def slope_of(function, x, mode, *, is_double):
    """Return a gradient that runs under the mode; or, for `is_double`, one of a loss that has such a part."""
    with mode:
        outputs = function(x)
        weights = torch.linspace(1, 2, outputs.numel()).view(outputs.shape)
        loss = (outputs.square() * weights).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=is_double)
    return torch.autograd.grad(slope.square().sum() + loss, x)[0] if is_double else slope


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_with_another_formula_are_known(name, is_double):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    x = (x @ x.T + torch.eye(6)).requires_grad_()
    try:
        plain = slope_of(FUNCTIONS[name], x, contextlib.nullcontext(), is_double=is_double)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip("this version of torch has no second derivative")
    seen = Seen()
    found = slope_of(FUNCTIONS[name], x, seen, is_double=is_double)
    assert torch.equal(plain, found) or (seen.formulas.in_backward and seen.formulas.in_forwards)
