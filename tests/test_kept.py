"""Programs that users write around a step keep the promise: the same bits on 1, 2 and 3 workers, and the
gradient of the unsplit batch, whatever they do with gradients, hooks, layers and errors."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import samestep
from samestep import AbandonedError, Step, TowerLoader, Towers
from samestep.errors import ConfigError, DisagreementError

from .cases import mostly_long, with_long
from .nets import batch_of, loss_of, net, run_passes, take_step
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def norm_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def in_double(batch):
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def check_gradients(model, batch, loss=loss_of):
    """Compare the gradients with those of the unsplit batch, in float64."""
    oracle = copy.deepcopy(model).double()
    oracle.zero_grad()
    loss(oracle, in_double(batch)).backward()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-6, msg=name)


# ---- what a user does with gradients -----------------------------------------------------------------


@program
def gradients_and_reports_kept_over_steps(job):
    model = net()
    towers = Towers(model, 5, job=job)
    optimizer = sgd(model)
    kept, reports, then = [], [], []
    for step in range(3):
        report = take_step(towers, batch_of(step))
        kept.append([p.grad for p in model.parameters()])
        then.append([p.grad.clone() for p in model.parameters()])
        reports.append(report)
        optimizer.step()
    for grads, before in zip(kept, then, strict=True):
        assert all(map(torch.equal, grads, before))
    norms = [report.grad_norm for report in reports]
    for norm, grads in zip(norms, then, strict=True):
        assert norm == pytest.approx(float(torch.cat([g.reshape(-1) for g in grads]).norm()), rel=1e-6)
    return samestep.digest(model), norms


@program
def a_norm_read_after_the_gradients_were_changed(job):
    model = net()
    towers = Towers(model, 5, job=job)
    report = take_step(towers, batch_of(0))
    norm = float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm())
    for p in model.parameters():
        p.grad.mul_(100)
        p.grad.data = torch.zeros_like(p)
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    return report.grad_norm


@program
def masked_through_data(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(4):
        take_step(towers, batch_of(step))
        check_gradients(model, batch_of(step))
        for p in model.parameters():
            p.grad.data = p.grad.data * (p.data > 0)
        sgd(model).step()
    return samestep.digest(model)


@program
def old_gradients_are_zeroed_and_do_not_count(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        take_step(towers, batch_of(step))
        check_gradients(model, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def a_penalty_of_its_own_after_the_average(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        sgd(model).step()
    return samestep.digest(model)


@program
def sharpness_aware_minimisation(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        report = take_step(towers, batch_of(step))
        old = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05 / report.grad_norm)
        take_step(towers, batch_of(step))
        with torch.no_grad():
            for p, value in zip(model.parameters(), old, strict=True):
                p.copy_(value)
        sgd(model).step()
    return samestep.digest(model)


@program
def surgery_on_two_losses(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        first = [p.grad for p in model.parameters()]
        take_step(towers, batch_of(step), lambda m, b: m(b["x"]).square().mean())
        for p, g in zip(model.parameters(), first, strict=True):
            dot = (p.grad * g).sum()
            p.grad = p.grad + (g - dot.clamp(max=0) / g.square().sum() * g)
        sgd(model).step()
    return samestep.digest(model)


@program
def an_optimizer_with_a_closure(job):
    model = net()
    towers = Towers(model, 5, job=job)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(2):
        optimizer.step(lambda step=step: take_step(towers, batch_of(step)).loss)
    return samestep.digest(model)


# ---- parameters beside the model ---------------------------------------------------------------------


def scaled_loss(temperature):
    return lambda model, batch: F.cross_entropy(model(batch["x"]) * temperature.exp(), batch["y"])


@program
def a_temperature_beside_the_model(job):
    model, temperature = net(), nn.Parameter(torch.zeros(()))
    towers = Towers(model, 5, job=job, also=temperature)
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    for step in range(3):
        take_step(towers, batch_of(step), scaled_loss(temperature))
        optimizer.step()
    return samestep.digest(model), temperature.item()


@program
def a_loss_head_in_a_step(job):
    model = net()
    head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    if not job.is_first:
        nn.init.ones_(head[0].weight)  # workers start from worker 0's
    towers = Towers(model, 5, job=job, also=[head])
    step = Step(
        towers,
        lambda model, batch: F.cross_entropy(head(model(batch["x"])), batch["y"]),
        torch.optim.AdamW([*model.parameters(), *head.parameters()], 0.01),
        clip_norm=1.0,
    )
    for number in range(3):
        step(batch_of(number))
    return samestep.digest(model), samestep.digest(head)


@program
def a_discriminator_with_norms_in_the_generators_passes(job):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
    of_d = Towers(discriminator, 4, job=job, also=generator, seed=1)
    of_g = Towers(generator, 4, job=job, also=discriminator)
    for step in range(3):
        x = batch_of(step)["x"]
        discriminator.requires_grad_(True)
        generator.requires_grad_(False)
        for tower in of_d(x):
            fake = generator(torch.randn_like(tower.batch))
            loss = F.softplus(-discriminator(tower.batch)).mean() + F.softplus(discriminator(fake)).mean()
            tower.backward(loss)
        of_d.average()
        sgd(discriminator).step()
        discriminator.requires_grad_(False)
        generator.requires_grad_(True)
        for tower in of_g(x):
            tower.backward(F.softplus(-discriminator(generator(torch.randn_like(tower.batch)))).mean())
        of_g.average()
        sgd(generator).step()
    return samestep.digest(generator), samestep.digest(discriminator)


@program
def two_towers_on_one_model(job):
    model = norm_net()
    one, two = Towers(model, 5, job=job), Towers(model, 4, job=job, seed=1)
    for step in range(3):
        take_step(one, batch_of(step))
        sgd(model).step()
        take_step(two, batch_of(step), lambda m, b: m(b["x"]).square().mean())
        sgd(model).step()
    return samestep.digest(model)


@program
def loops_that_follow_each_other_before_their_averages(job):
    torch.manual_seed(0)
    models = [norm_net(), norm_net()]
    both = [Towers(model, num_towers, job=job) for model, num_towers in zip(models, (5, 4), strict=True)]
    drawn = []
    for step in range(2):
        for towers in both:
            run_passes(towers, batch_of(step))
        for towers in both:
            towers.average()
            sgd(towers.model).step()
        drawn.append(torch.rand(()).item())
    return samestep.digest(models[0]) + samestep.digest(models[1]) + str(drawn)


@program
def targets_written_to_in_passes(job):
    model = net()
    towers = Towers(model, 5, job=job)
    targets = [{"weight": torch.ones(1)} for _ in range(21)]
    for step in range(3):
        for tower in towers({**batch_of(step), "targets": targets}):
            weights = torch.cat([target["weight"].mul_(0.5) for target in tower.batch["targets"]])
            losses = F.cross_entropy(model(tower.batch["x"]), tower.batch["y"], reduction="none")
            tower.backward((losses * weights).mean())
        towers.average()
        sgd(model).step()
    assert all(target["weight"] == 1 for target in targets)
    return samestep.digest(model)


@program
def a_perceptual_loss_that_nobody_trains(job):
    model, judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    nn.init.normal_(judge[0].weight)
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step), lambda m, b: (judge(m(b["x"])) - judge(b["x"])).square().mean())
        sgd(model).step()
    return samestep.digest(model)


@program
def a_teacher_that_follows_after_each_step(job):
    model = norm_net()
    teacher = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
    teacher.eval()
    towers = Towers(model, 5, job=job)

    def loss(m, b):
        with torch.no_grad():
            target = teacher(b["x"]).softmax(-1)
        return F.cross_entropy(m(b["x"]), target)

    for step in range(3):
        take_step(towers, batch_of(step), loss)
        sgd(model).step()
        teacher.update_parameters(model)
    return samestep.digest(model), samestep.digest(teacher)


# ---- what layers do in a pass ------------------------------------------------------------------------


@program
def spectral_norms_of_both_kinds(job):
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Linear(8, 3)),
    )
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def parametrized_layers(job):
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(6, 6)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(6, 3)),
    )
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def checkpointed_activations_of_both_kinds(job):
    model = norm_net()
    tied = nn.Linear(8, 8)
    with torch.no_grad():
        tied.weight.copy_(torch.eye(8))
    model.add_module("tied", tied)

    def run(m, x, use_reentrant):
        hidden = checkpoint(m[0], x.requires_grad_(), use_reentrant=use_reentrant)
        for _ in range(2):
            hidden = checkpoint(m.tied, hidden, use_reentrant=use_reentrant)
        return m[3](m[2](m[1](hidden)))

    towers = Towers(model, 5, job=job, bucket_bytes=64)
    for step in range(4):
        take_step(
            towers, batch_of(step), lambda m, b, s=step: F.cross_entropy(run(m, b["x"], s % 2 == 0), b["y"])
        )
        sgd(model).step()
    return samestep.digest(model)


class Recomputed(torch.autograd.Function):
    """What runs a block again in its backward, and backward through it, as reversible nets do."""

    @staticmethod
    def forward(context, x, block):
        context.block = block
        context.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(context, gradient):
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            context.block(x).backward(gradient)
        return x.grad, None


def a_shared_block(job, bucket_bytes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3))

    def loss(model, batch):
        hidden = model[0](batch["x"])
        for _ in range(3):
            hidden = Recomputed.apply(hidden, model[1])
        return F.cross_entropy(model[2](hidden), batch["y"])

    towers = Towers(model, 7, job=job, bucket_bytes=bucket_bytes)
    for step in range(3):
        take_step(towers, batch_of(step), loss)
        check_gradients(model, batch_of(step), loss)
        sgd(model).step()
    return samestep.digest(model)


@program
def a_shared_block_that_is_recomputed(job):
    return a_shared_block(job, 2**20)


@program
def a_shared_block_that_is_recomputed_in_small_buckets(job):
    return a_shared_block(job, 64)


@program
def frozen_norms_and_stochastic_depth(job):
    model = norm_net()
    model[1].eval().requires_grad_(False)
    towers = Towers(model, 5, job=job)

    def loss(m, b):
        hidden = m[0](b["x"])
        if random.random() < 0.5:
            hidden = m[1](hidden)
        return F.cross_entropy(m[3](F.dropout(hidden, 0.2)), b["y"])

    for step in range(3):
        take_step(towers, batch_of(step), loss)
        sgd(model).step()
    return samestep.digest(model)


@program
def a_gradient_penalty_and_adversarial_inputs(job):
    model = net()
    towers = Towers(model, 5, job=job)

    def loss(m, b):
        x = b["x"].requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        attacked = x + 0.1 * slope.sign().detach()
        return F.cross_entropy(m(attacked), b["y"]) + slope.square().sum(1).mean()

    for step in range(3):
        take_step(towers, batch_of(step), loss)
        sgd(model).step()
    return samestep.digest(model)


@program
def clipped_gradients_of_each_example(job):
    model = net()
    towers = Towers(model, 5, job=job)

    def clipped(m, b):
        named = {name: p.detach() for name, p in m.named_parameters()}

        def one(weights, x, y):
            return F.cross_entropy(torch.func.functional_call(m, weights, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(named, b["x"], b["y"])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        return {n: torch.einsum("n,n...->...", (1 / norms).clamp(max=1), g) for n, g in each.items()}

    def total(m, b):
        return sum((p * clipped(m, b)[name]).sum() for name, p in m.named_parameters())

    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward_sum(total(model, tower.batch), tower.rows)
        towers.average()
        check_gradients(model, batch_of(step), lambda m, b: total(m, b) / len(b["x"]))
        sgd(model).step()
    return samestep.digest(model)


@program
def an_inner_step_by_functional_call(job):
    model = net()
    towers = Towers(model, 5, job=job)

    def loss(m, b):
        named = dict(m.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(m, named, b["x"]), b["y"])
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(named.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(m, fast, b["x"]), b["y"])

    for step in range(2):
        take_step(towers, batch_of(step), loss)
        sgd(model).step()
    return samestep.digest(model)


class OwnNorm(nn.Module):
    """Batch normalisation with buffers of its own, through the function."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


@program
def functional_batch_norm_with_a_policy(job):
    model = norm_net()
    model[1] = OwnNorm()
    towers = Towers(model, 5, job=job, buffers={"1.*": "mean"})
    for step in range(3):
        take_step(towers, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def quantisation_observers(job):
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    model = net()
    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = nn.Sequential(model[0], fake, model[1], model[2])
    model(batch_of(0)["x"])
    towers = Towers(model, 5, job=job, buffers={"1.*": "first"})
    for step in range(3):
        take_step(towers, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def rows_of_an_embedding_renormalised_after_each_step(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    towers = Towers(model, 5, job=job)
    for step in range(3):
        words = torch.randint(9, (11, 2), generator=torch.Generator().manual_seed(step))
        for tower in towers(words):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        sgd(model).step()
        with torch.no_grad():
            model[0].weight.renorm_(2, 0, 1.0)
    return samestep.digest(model)


# ---- hooks -------------------------------------------------------------------------------------------


@program
def masks_in_tensor_hooks(job):
    model = net()
    mask = (torch.arange(8) % 2)[:, None].float()
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        assert not model[0].weight.grad[0].any()
        sgd(model).step()
    return samestep.digest(model)


@program
def forward_and_backward_hooks_of_modules(job):
    model = net()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: output * 1.5)
    model[1].register_full_backward_hook(lambda module, before, after: seen.append(1))
    towers = Towers(model, 5, job=job)
    for step in range(3):
        take_step(towers, batch_of(step))
        sgd(model).step()
    assert seen
    return samestep.digest(model)


# ---- unusual tensors ---------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.real = nn.Linear(4, 3)

    def forward(self, x):
        return self.real((x.to(self.weight.dtype) @ self.weight).abs())


@program
def complex_parameters(job):
    model = Complex()
    step = Step(Towers(model, 5, job=job), loss_of, torch.optim.Adam(model.parameters(), 0.01), clip_norm=0.5)
    norms = [step(batch_of(number)).grad_norm for number in range(3)]
    towers = Towers(model, 5, job=job)
    take_step(towers, batch_of(3))
    oracle = copy.deepcopy(model)
    oracle.zero_grad()
    loss_of(oracle, batch_of(3)).backward()
    torch.testing.assert_close(model.weight.grad, oracle.weight.grad)
    assert model.unused.grad is None
    return samestep.digest(model), norms


@program
def expanded_buffers(job):
    model = net()
    model.register_buffer("scale", torch.full((1,), 2.0 + job.rank).expand(3))
    model.register_buffer("windows", torch.arange(8.0).unfold(0, 3, 1)[:, 0])
    towers = Towers(model, 5, job=job)
    for step in range(2):
        take_step(towers, batch_of(step), lambda m, b: F.cross_entropy(m(b["x"]) * m.scale, b["y"]))
        sgd(model).step()
    return samestep.digest(model)


@program
def parameters_with_odd_strides(job):
    torch.manual_seed(0)
    model = net()
    model[0] = nn.Linear(6, 999)
    model[0].weight = nn.Parameter(torch.randn(6, 1998)[:, ::2].T)
    model[2].weight = nn.Parameter(torch.randn(2, 999, 3)[1].T)
    towers = Towers(model, 5, job=job)
    step = Step(towers, loss_of, sgd(model), clip_norm=0.01)
    norms = [step(batch_of(number)).grad_norm for number in range(3)]
    return samestep.digest(model), norms


@program
def a_tower_with_nothing_to_count(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            if tower.index == 3:
                tower.backward_sum(0.0, 0)
            else:
                total = F.cross_entropy(model(tower.batch["x"]), tower.batch["y"], reduction="sum")
                tower.backward_sum(total, tower.rows)
        towers.average()
        sgd(model).step()
    return samestep.digest(model)


# ---- steps that do not end ---------------------------------------------------------------------------


def with_failures(job, fail, steps=3, make=norm_net, **settings):
    """Train, abandoning each step once where `fail(step, tower)` raises, and taking it again."""
    model = make()
    towers = Towers(model, 5, job=job, **settings)
    optimizer = sgd(model)
    for step in range(steps):
        for attempt in range(2):
            try:
                for tower in towers(batch_of(step)):
                    loss = loss_of(model, tower.batch)
                    if attempt == 0:
                        fail(step, tower)
                    tower.backward(loss)
                assert attempt == 1 or towers.average() is None
            except (KeyError, KeyboardInterrupt, AbandonedError, torch.OutOfMemoryError):
                assert attempt == 0
                towers.abandon()
                towers.abandon()
                assert towers.step == step
                assert all(p.grad is None for p in model.parameters())
        towers.average()
        optimizer.step()
    return samestep.digest(model)


def plain(job, make=norm_net, steps=3, **settings):
    model = make()
    towers = Towers(model, 5, job=job, **settings)
    optimizer = sgd(model)
    for step in range(steps):
        take_step(towers, batch_of(step))
        optimizer.step()
    return samestep.digest(model)


def raising(error, where):
    def fail(step, tower):
        if tower.index == where:
            raise error

    return fail


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"statistics": "pooled", "bucket_bytes": 64},
        {},
        {"statistics": "pooled"},
        {"bucket_bytes": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("error", "where"),
    [
        (KeyError("x"), 4),
        (KeyboardInterrupt(), 0),
        (torch.OutOfMemoryError("full"), 2),
        *((KeyError("x"), tower) for tower in (0, 1, 2)),
        (KeyboardInterrupt(), 4),
    ],
    ids=repr,
)
def test_a_step_that_one_worker_abandons_is_as_if_it_had_not_begun(error, where, settings):
    expected = set(values(lambda job: plain(job, **settings), 1))
    for num_workers in (1, 2, 3):
        found = values(
            lambda job: with_failures(job, raising(error, where), **settings), num_workers, num_workers
        )
        assert set(found) == expected


def test_the_others_are_told_that_a_step_was_abandoned_and_why():
    def work(job):
        towers = Towers(net(), 5, job=job)
        for tower in towers(batch_of(0)):
            try:
                if tower.index == 2:
                    raise KeyError("pixels")
                tower.backward(loss_of(towers.model, tower.batch))
            except KeyError:
                towers.abandon()
                return "abandoned"
        return towers.average()

    for num_workers in (2, 3):
        outcomes = simulate(work, num_workers)
        guilty = 0 if num_workers == 2 else 1
        for rank, outcome in enumerate(outcomes):
            if rank == guilty:
                assert outcome.value == "abandoned", outcome.text
            else:
                assert isinstance(outcome.error, AbandonedError), outcome.text
                assert f"worker {guilty}" in outcome.text
                assert "KeyError: 'pixels'" in outcome.text


class Failing(torch.utils.data.Dataset):
    """Rows, one of which cannot be read."""

    def __len__(self):
        return 15

    def __getitem__(self, index):
        if index == 11:
            raise OSError("picture 11 is cut off")
        return torch.randn(6)


def test_rows_that_one_worker_cannot_read_end_the_step_on_all():
    def work(job):
        towers = Towers(net(), 5, job=job)
        for tower in towers(next(iter(TowerLoader(Failing(), 15, towers)))):
            tower.backward(towers.model(tower.batch).square().mean())
        return towers.average()

    for num_workers in (1, 2, 3):
        errors = [outcome.error for outcome in simulate(work, num_workers)]
        assert [type(error) for error in errors].count(OSError) == 1
        told = [str(error) for error in errors if isinstance(error, DisagreementError)]
        assert len(told) == num_workers - 1
        assert all("picture 11 is cut off" in text for text in told)


def test_an_optimizer_of_other_parameters_on_one_worker_is_told_to_all():
    def work(job):
        model = net()
        beside = [nn.Parameter(torch.ones(2))] if job.rank == 1 else []
        optimizer = torch.optim.SGD([*model.parameters(), *beside], 0.1)
        return Step(Towers(model, 5, job=job), loss_of, optimizer)(batch_of(0))

    for num_workers in (2, 3):
        for rank, outcome in enumerate(simulate(work, num_workers)):
            assert isinstance(outcome.error, ConfigError if rank == 1 else AbandonedError), outcome.text
            assert "also=" in outcome.text


@pytest.mark.long
def test_batches_that_are_never_averaged_are_told_of():
    def work(job):
        towers = Towers(net(), 5, job=job)
        for step in range(2):
            run_passes(towers, batch_of(step))
        towers.average()

    for num_workers in (1, 2, 3):
        with pytest.warns(UserWarning, match="step 0 is abandoned, although all its towers have run"):
            values(work, num_workers)


@program
def a_loop_left_by_break(job):
    model = norm_net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        for _ in towers(batch_of(step)):
            break
        take_step(towers, batch_of(step))
        check_gradients_of_norm_net = model[0].weight.grad
        assert check_gradients_of_norm_net is not None
        sgd(model).step()
    assert samestep.digest(model) == plain_digest()
    return samestep.digest(model)


def plain_digest():
    return values(plain, 1)[0]


@program
def a_step_left_after_all_its_towers(job):
    model = norm_net()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        run_passes(towers, batch_of(step))
        towers.abandon()
        take_step(towers, batch_of(step))
        sgd(model).step()
    return samestep.digest(model)


@program
def a_step_whose_loss_raises_once(job):
    model = norm_net()
    asked = []

    def loss(m, b):
        asked.append(1)
        if len(asked) == 2:
            raise KeyError("labels")
        return loss_of(m, b)

    towers = Towers(model, 6, job=job)
    step = Step(towers, loss, sgd(model))
    number = 0
    while number < 3:
        try:
            step(batch_of(number))
            number += 1
        except (KeyError, AbandonedError):
            pass
    return samestep.digest(model)


# ---- data --------------------------------------------------------------------------------------------


@program
def an_evaluation_on_the_first_worker_that_draws_nothing_of_the_loader(job):
    model = norm_net()
    towers = Towers(model, 5, job=job)
    loader = TowerLoader(torch.randn(36, 6, generator=torch.Generator().manual_seed(0)), 12, towers)
    for batch in loader:
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        sgd(model).step()
        if job.is_first:
            model.eval()
            F.dropout(model(torch.randn(5, 6)), 0.5)
            model.train()
    return samestep.digest(model)


LONG = {
    "clipped_gradients_of_each_example",
    "a_discriminator_with_norms_in_the_generators_passes",
    "a_step_left_after_all_its_towers",
    "a_shared_block_that_is_recomputed",
    "loops_that_follow_each_other_before_their_averages",
    "quantisation_observers",
    "an_evaluation_on_the_first_worker_that_draws_nothing_of_the_loader",
    "old_gradients_are_zeroed_and_do_not_count",
    "parametrized_layers",
    "expanded_buffers",
    "masks_in_tensor_hooks",
    "a_penalty_of_its_own_after_the_average",
    "an_optimizer_with_a_closure",
    "surgery_on_two_losses",
}


@pytest.mark.filterwarnings("ignore:a hook on 0.weight sees each tower's sum")
@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
@pytest.mark.parametrize("name", with_long(PROGRAMS, LONG))
def test_any_number_of_workers_takes_the_same_steps(name, num_workers):
    assert len({value for n in (1, num_workers) for value in map(str, values(PROGRAMS[name], n, n))}) == 1


def test_a_parameter_beside_the_model_is_watched_in_passes():
    def work(job):
        model, scale = net(), nn.Parameter(torch.ones(1))
        towers = Towers(model, 3, job=job, also=scale)
        for tower in towers(torch.randn(6, 6)):
            loss = (model(tower.batch) * scale).square().mean()
            scale.data += 1.0
            tower.backward(loss)
        towers.average()

    for outcome in simulate(work, 2):
        assert "wrote to also" in outcome.text


def test_a_model_that_has_a_part_called_also_is_refused():
    model = nn.Module()
    model.also = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="has an attribute also"):
        Towers(model, 3, also=nn.Linear(2, 2))
