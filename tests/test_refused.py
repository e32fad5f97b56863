"""Programs that leave the guarantee's ground hear so by name, on every worker, at any number of them."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives

import samestep
from samestep import Error, Step, Towers
from samestep.errors import BatchError, BufferPolicyError, ConfigError, DisagreementError, UsageError

from .cases import mostly_long
from .nets import batch_of, loss_of, net, run_passes, unseen_count
from .simulation import simulate

pytestmark = pytest.mark.sampled

PROGRAMS = {}


def refused(error, *words):
    """A program that must end on every worker with this error, whose text has these words."""

    def register(function):
        PROGRAMS[function.__name__] = (function, error, words)
        return function

    return register


def train(model, job, steps=3, loss=loss_of, optimizer=None, after=None, **settings):
    towers = Towers(model, 5, job=job, **settings)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        for tower in towers(batch_of(step)):
            tower.backward(loss(model, tower.batch))
        towers.average()
        optimizer.step()
        if after is not None:
            after(step)
    return samestep.digest(model)


# ---- parameters written in a pass --------------------------------------------------------------------


@refused(UsageError, "0.weight", "step 0", "tower", "optimizer.step()")
def an_embedding_with_max_norm(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Flatten(), nn.Linear(12, 3))

    def loss(m, b):
        return m((b["x"][:, :2].abs() * 3).long().clamp(max=8)).square().mean()

    train(model, job, loss=loss)


class Scale(nn.Linear):
    """A layer whose first rows give its first values."""

    is_new = True

    def forward(self, x):
        if self.is_new:
            self.bias.data = -F.linear(x, self.weight).mean(0)
            self.is_new = False
        return super().forward(x)


@refused(UsageError, "step 0", "wrote to 0.bias", "run the model once before making Towers")
def a_layer_that_takes_its_first_values_from_rows(job):
    torch.manual_seed(0)
    train(nn.Sequential(Scale(6, 3)), job)


def wide():
    """A model of which a step hashes a small part: what the other checks find, they find alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 60_000), nn.Linear(60_000, 3))


@refused(UsageError, "0.bias", "step 0, tower")
def a_write_to_a_large_model(job):
    def loss(m, b):
        with torch.no_grad():
            m[0].bias[77] += 1
        return loss_of(m, b)

    model = wide()
    train(model, job, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 1e-4))


@refused(UsageError, "0.bias", "step 0")
def new_memory_in_a_large_model(job):
    kept = []  # or the new memory may be where the old was

    def loss(m, b):
        kept.append(m[0].bias.data)
        m[0].bias.data = m[0].bias.data + 1
        return loss_of(m, b)

    model = wide()
    train(model, job, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 1e-4))


class Momentum(nn.Module):
    """An encoder and its moving average, updated in the forward."""

    def __init__(self, through_data):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 3), nn.Linear(6, 3)
        self.key.requires_grad_(False)
        self.through_data = through_data
        self.kept = []  # or new memory may be where the old was

    @torch.no_grad()
    def follow(self):
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            if self.through_data:
                self.kept.append(k.data)
                k.data = k.data * 0.9 + q.data * 0.1
            else:
                k.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, x):
        self.follow()
        return self.query(x) * self.key(x)


@refused(UsageError, "key.weight", "step 0")
def a_momentum_encoder_in_the_forward(job):
    train(Momentum(False), job)


@refused(UsageError, "key.weight", "step 0")
def a_momentum_encoder_through_data(job):
    train(Momentum(True), job)


class InitializedByData(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.how, self.is_ready = how, False

    def forward(self, x):
        out = self.linear(x)
        if not self.is_ready:
            self.is_ready = True
            value = 1 / out.detach().std(0, correction=0)
            if self.how == "data":
                self.scale.data.copy_(value)
            elif self.how == "no grad":
                with torch.no_grad():
                    self.scale.copy_(value)
            else:
                self.scale = nn.Parameter(value)
        return out * self.scale


@refused(UsageError, "scale", "step 0")
def initialisation_by_data(job):
    train(InitializedByData("no grad"), job)


@refused(UsageError, "scale", "step 0")
def initialisation_through_data(job):
    train(InitializedByData("data"), job)


@refused(UsageError, "scale", "step 0")
def a_parameter_replaced_in_a_pass(job):
    train(InitializedByData("replace"), job)


@refused(UsageError, "step 0: a pass replaced layers of the model (Linear), so nobody would average")
def a_layer_replaced_in_each_pass(job):
    def loss(model, batch):
        model[0] = nn.Linear(6, 8)
        return loss_of(model, batch)

    train(net(), job, loss=loss)


@refused(UsageError, "0.weight")
def weights_clipped_through_data_in_the_loss(job):
    def loss(model, batch):
        model[0].weight.data.clamp_(-0.1, 0.1)
        return loss_of(model, batch)

    train(net(), job, steps=40, loss=loss)


@refused(UsageError, "0.weight")
def one_value_of_a_large_layer_changed_in_late_passes(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 60_000), nn.Linear(60_000, 3))
    calls = unseen_count(1)

    def loss(m, b):
        if calls() > 3:
            m[0].weight.data.numpy()[33_333, 3] += 1e-3
        return loss_of(m, b)

    train(model, job, steps=40, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 1e-4))


def train_a_part(job, edit):
    model, towers = net(), None
    towers = Towers(model, 7, job=job)
    for step in range(2):
        for tower in towers(batch_of(step, 21)):
            edit(model[0], step, "before")
            loss = loss_of(model, tower.batch)
            edit(model[0], step, "loss")
            tower.backward(loss)
            edit(model[0], step, "after")
        towers.average()


@refused(UsageError, "a pass changed requires_grad of 0.weight, 0.bias: all towers", "after average()")
def a_layer_frozen_after_a_pass(job):
    train_a_part(job, lambda layer, step, when: layer.requires_grad_(when != "after"))


@refused(
    UsageError, "step 0: a pass changed requires_grad of 0.bias: all towers of a step must train the same"
)
def a_layer_frozen_in_the_passes_of_a_step(job):
    train_a_part(job, lambda layer, step, when: layer.bias.requires_grad_(step == 1))


@refused(UsageError, "step 0: a pass changed requires_grad of 0.bias", "put it back before the pass ends")
def a_layer_frozen_between_loss_and_backward(job):
    train_a_part(job, lambda layer, step, when: layer.bias.requires_grad_(when == "before"))


@refused(UsageError, "0.weight", "step 0", "average()")
def an_optimizer_inside_the_pass(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    towers = Towers(model, 5, job=job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    towers.average()


# ---- gradients beside the average --------------------------------------------------------------------


def penalty(model):
    return 0.01 * sum(p.square().sum() for p in model.parameters())


@refused(UsageError, "average()")
def a_penalty_after_the_loop_and_before_the_average(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
    penalty(model).backward()
    towers.average()


@refused(UsageError, "loss.backward()")
def a_penalty_in_a_pass(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for tower in towers(batch_of(0)):
        penalty(model).backward()
        tower.backward(loss_of(model, tower.batch))
    towers.average()


@refused(UsageError, "gradient", "tower.backward(loss)")
def a_penalty_after_a_tower(job):
    model = net()
    towers = Towers(model, 5, job=job)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
        penalty(model).backward()
    towers.average()


@refused(UsageError, "2.bias", "post-accumulate", "after average()")
def a_clamp_in_a_post_accumulate_hook(job):
    model = net()
    model[2].bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.01, 0.01))
    train(model, job)


@refused(UsageError, "0.weight", "post-accumulate", "optimizer.step(), after average()")
def an_optimizer_in_backward(job):
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    train(model, job)


@refused(UsageError, "2.bias", "post-accumulate")
def a_hook_that_comes_later(job):
    model = net()

    def after(step):
        if step == 1:
            model[2].bias.register_post_accumulate_grad_hook(lambda p: None)

    train(model, job, after=after)


@refused(UsageError, "0.weight", "post-accumulate")
def a_hook_that_each_pass_registers_and_removes(job):
    model = net()
    towers = Towers(model, 4, job=job)
    for tower in towers(batch_of(0)):
        loss = loss_of(model, tower.batch)
        hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.01, 0.01))
        tower.backward(loss)
        hook.remove()
    towers.average()


# ---- parameters that nobody averages -----------------------------------------------------------------


def with_temperature(temperature):
    return lambda model, batch: F.cross_entropy(model(batch["x"]) * temperature.exp(), batch["y"])


@refused(UsageError, "also=", "[]")
def a_temperature_in_the_models_optimizer(job):
    model, temperature = net(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    train(model, job, loss=with_temperature(temperature), optimizer=optimizer)


@refused(UsageError, "also=")
def a_loss_head_with_an_optimizer_of_its_own(job):
    model, head = net(), nn.Linear(3, 3)
    of_head = torch.optim.SGD(head.parameters(), 0.1)
    train(
        model,
        job,
        loss=lambda m, b: F.cross_entropy(head(m(b["x"])), b["y"]),
        after=lambda step: of_head.step(),
    )


def train_beside(job, leaf, loss):
    model = net()
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([leaf], 0.1)
    towers = Towers(model, 5, job=job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss(model, tower.batch))
        towers.average()
        for optimizer in optimizers:
            optimizer.step()


@refused(UsageError, "also=", "nn.Parameter", "[1, 6]")
def a_prompt_that_is_no_parameter(job):
    prompt = torch.zeros(1, 6, requires_grad=True)
    train_beside(job, prompt, lambda m, b: F.cross_entropy(m(b["x"] + prompt), b["y"]))


def train_whole_batches_beside(job, leaf, forward, loss):
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), leaf], 0.1)
    towers = Towers(model, 5, job=job)
    towers.whole_batch(batch_of(0), lambda b: forward(model(b["x"])), loss)
    towers.average()
    optimizer.step()


@refused(UsageError, "also=", "[3]")
def a_head_in_the_forward_of_a_whole_batch(job):
    head = nn.Parameter(torch.ones(3))
    train_whole_batches_beside(job, head, lambda out: out * head, lambda out, _: -torch.pdist(out).mean())


@refused(UsageError, "also=", "[]")
def a_temperature_in_the_loss_of_a_whole_batch(job):
    temperature = nn.Parameter(torch.ones(()))
    train_whole_batches_beside(
        job, temperature, lambda out: out, lambda out, _: (out @ out.T * temperature).logsumexp(1).mean()
    )


@refused(ConfigError, "also is a Tensor", "nn.Parameter")
def a_tensor_beside_the_model(job):
    Towers(net(), 5, job=job, also=torch.zeros((), requires_grad=True))


@refused(ConfigError, "buffer graph", "sparse_coo", "values")
def a_sparse_buffer(job):
    model = net()
    model.register_buffer("graph", torch.eye(6).to_sparse())
    train(model, job, buffers={"graph": "ignore"})


@refused(ConfigError, "also=", "optimizer")
def a_step_with_a_parameter_beside_the_model(job):
    model, temperature = net(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
    step = Step(Towers(model, 5, job=job), with_temperature(temperature), optimizer)
    for number in range(3):
        step(batch_of(number))


@refused(ConfigError, "also=", "optimizer")
def a_step_whose_optimizer_holds_a_layer_that_was_replaced(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = Step(Towers(model, 5, job=job), loss_of, optimizer)
    step(batch_of(0))
    model[2] = nn.Linear(8, 3)
    step(batch_of(1))


# ---- buffers -----------------------------------------------------------------------------------------


class Cached(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        self.how = how
        self.calls = 0
        if how != "registered":
            self.register_buffer("seen", torch.zeros(6) if how != "wide" else torch.zeros(9, 6))

    def forward(self, x):
        self.calls += 1
        if self.how == "data":
            self.seen.data += x.mean(0)
        elif self.how == "wide":
            self.seen.data[3] += x.mean(0)
        elif self.how == "registered":
            self.register_buffer("seen", x.mean(0))
        elif self.calls > 5:
            F.batch_norm(x, self.seen, torch.ones(6), training=True)
        return self.linear(x - self.seen if self.how == "registered" else x - self.seen.sum())


@refused(BufferPolicyError, "seen", "step 0")
def a_buffer_written_through_data(job):
    train(Cached("data"), job)


@refused(BufferPolicyError, "seen", "step 0")
def a_matrix_written_through_data(job):
    train(Cached("wide"), job)


@refused(BufferPolicyError, "seen", "step 0")
def a_buffer_registered_in_a_forward(job):
    train(Cached("registered"), job)


@refused(BufferPolicyError, "seen")
def functional_batch_norm_after_some_steps(job):
    train(Cached("batch norm"), job, steps=8)


def nets():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return generator, discriminator


@refused(BufferPolicyError, "running_mean", "also=")
def a_discriminator_with_norms_in_the_generators_passes(job):
    generator, discriminator = nets()
    Towers(discriminator, 5, job=job)
    train(generator, job, loss=lambda g, b: F.softplus(-discriminator(g(b["x"]))).mean())


@refused(BufferPolicyError, "running_mean", "also=")
def a_net_without_towers_in_the_passes(job):
    generator, discriminator = nets()
    train(generator, job, loss=lambda g, b: F.softplus(-discriminator(g(b["x"]))).mean())


@refused(BufferPolicyError, "running_mean", "also=", "eval()")
def a_teacher_in_training_mode(job):
    model, (_, teacher) = net(), nets()

    def loss(m, b):
        with torch.no_grad():
            target = teacher(b["x"])
        return (m(b["x"]) - target).square().mean()

    train(model, job, loss=loss)


# ---- losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hand_in", "words"),
    [
        (lambda tower, loss: tower.backward(None), ("None", "expected a scalar tensor")),
        (lambda tower, loss: tower.backward((loss, 3)), ("tuple", "backward_sum(total, count)")),
        (lambda tower, loss: tower.backward(loss.item()), ("float", "expected a scalar tensor")),
        (lambda tower, loss: tower.backward(loss.detach()), ("does not require grad",)),
        (lambda tower, loss: tower.backward(loss.expand(2)), ("shape (2,)",)),
        (lambda tower, loss: tower.backward_sum(loss, None), ("count", "None")),
        (lambda tower, loss: tower.backward_sum(loss, "3"), ("count", "'3'")),
        (lambda tower, loss: tower.backward_sum(None, 3), ("None",)),
        (lambda tower, loss: tower.backward_sum(1.0, 3), ("float",)),
        (lambda tower, loss: tower.backward(loss * 1j), ("complex",)),
    ],
)
def test_what_is_no_loss_is_refused(hand_in, words):
    model = net()
    towers = Towers(model, 5)
    for tower in towers(batch_of(0)):
        with pytest.raises(UsageError) as caught:
            hand_in(tower, loss_of(model, tower.batch))
        assert all(word in str(caught.value) for word in words), caught.value
        break


@pytest.mark.parametrize("result", [None, 3.0, (), (1, 2), (1, 2, 3), "loss"], ids=repr)
def test_what_a_loss_function_must_not_return_is_refused(result):
    model = net()
    step = Step(Towers(model, 5), lambda m, b: result, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UsageError, match=r"loss_fn|loss"):
        step(batch_of(0))


# ---- workers that have come apart --------------------------------------------------------------------


@refused(DisagreementError, "worker", "lr")
def another_learning_rate_in_a_step(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if job.rank else 0.2)
    step = Step(Towers(model, 5, job=job), loss_of, optimizer)
    for number in range(40):
        step(batch_of(number))


@refused(DisagreementError, "worker", "optimizer")
def another_optimizer_in_a_step(job):
    model = net()
    kind = torch.optim.SGD if job.rank else torch.optim.Adam
    step = Step(Towers(model, 5, job=job), loss_of, kind(model.parameters(), 0.1))
    step(batch_of(0))


@refused(DisagreementError, "worker", "autocast")
def another_precision_in_a_step(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    precision = torch.bfloat16 if job.rank else None
    step = Step(Towers(model, 5, job=job), loss_of, optimizer, autocast=precision)
    step(batch_of(0))


@refused(DisagreementError, "worker", "clip_norm")
def another_clipping_in_a_step(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = Step(Towers(model, 5, job=job), loss_of, optimizer, clip_norm=1.0 + job.rank)
    step(batch_of(0))


@refused(DisagreementError, "worker", "weights")
def another_learning_rate_in_a_loop(job):
    model = net()
    train(model, job, steps=40, optimizer=torch.optim.SGD(model.parameters(), 0.1 + 0.1 * job.rank))


@refused(DisagreementError, "worker", "weights", "0.bias")
def an_edit_on_the_first_worker(job):
    model = net()

    def after(step):
        if step == 1 and job.is_first:
            with torch.no_grad():
                model[0].bias[3] = 0.5

    train(model, job, steps=40, after=after)


@refused(DisagreementError, "worker", "weights")
def one_bit_of_a_large_layer_on_the_last_worker(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 60_000), nn.Linear(60_000, 3))

    def after(step):
        if step == 1 and job.rank == job.world_size - 1:
            model[0].weight.data.view(torch.int32)[7_777, 3] ^= 1

    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    train(model, job, steps=40, after=after, optimizer=optimizer)


def autocast_loss(job, dtypes):
    def loss(model, batch):
        dtype = dtypes[job.rank == job.world_size - 1]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return loss_of(model, batch)

    return loss


@refused(DisagreementError, "step 0", "autocast in the passes = torch.bfloat16", "no autocast")
def autocast_on_the_last_worker(job):
    train(net(), job, loss=autocast_loss(job, [None, torch.bfloat16]))


@refused(DisagreementError, "step 0", "autocast in the passes = torch.float16", "torch.bfloat16")
def another_dtype_of_autocast_on_the_last_worker(job):
    train(net(), job, loss=autocast_loss(job, [torch.bfloat16, torch.float16]))


@refused(DisagreementError, "worker", "batch")
def one_changed_value_in_the_batch(job):
    model = net()
    towers = Towers(model, 5, job=job)
    batch = {"x": torch.randn(500, 600, generator=torch.Generator().manual_seed(0))[:, :600]}
    if job.rank == job.world_size - 1:
        batch["x"][337, 411] += 1e-4
    for tower in towers(batch):
        tower.backward(model(tower.batch["x"][:, :6]).square().mean())
    towers.average()


@refused(DisagreementError, "worker", "batch fingerprint", "only one worker drew from it")
def an_evaluation_on_the_first_worker_that_shifts_the_order(job):
    torch.manual_seed(0)
    model, data = net(), torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    towers = Towers(model, 5, job=job)
    for _ in range(2):
        for tower in towers(data[torch.randperm(40)[:20]]):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        if job.is_first:
            F.dropout(model(data), 0.5)


ONLY_APART = {
    "an_evaluation_on_the_first_worker_that_shifts_the_order",
    "another_learning_rate_in_a_step",
    "another_optimizer_in_a_step",
    "another_precision_in_a_step",
    "another_clipping_in_a_step",
    "another_learning_rate_in_a_loop",
    "an_edit_on_the_first_worker",
    "one_bit_of_a_large_layer_on_the_last_worker",
    "one_changed_value_in_the_batch",
    "autocast_on_the_last_worker",
    "another_dtype_of_autocast_on_the_last_worker",
}
"""Programs that are in order where there is one worker."""


@pytest.mark.filterwarnings("ignore:passes changed")  # some count how often they run
@pytest.mark.filterwarnings("ignore:.*its loss was computed in another way")
@pytest.mark.parametrize("num_workers", mostly_long([3, 1, 2], 1))
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_workers_are_told(name, num_workers):
    work, error, words = PROGRAMS[name]
    if num_workers == 1 and name in ONLY_APART:
        return
    for outcome in simulate(work, num_workers, num_workers):
        assert isinstance(outcome.error, Error), outcome
        if not isinstance(outcome.error, error):
            # Another worker was the first to say so, in these words.
            assert isinstance(outcome.error, DisagreementError), outcome.text
            assert "worker" in outcome.text
        assert all(word in outcome.text for word in words), outcome.text


# ---- loops and losses of other shapes ----------------------------------------------------------------


@refused(UsageError, "Tower(index=", "other Towers began", "nn.ModuleList")
def two_loops_in_turns(job):
    first, second = Towers(net(), 5, job=job), Towers(net(), 5, job=job)
    for one, other in zip(first(batch_of(0)), second(batch_of(1)), strict=True):
        one.backward(loss_of(first.model, one.batch))
        other.backward(loss_of(second.model, other.batch))


@refused(UsageError, "SGD.step()", "average()")
def clipping_and_a_step_in_the_loop(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    towers = Towers(model, 5, job=job)
    for tower in towers(batch_of(0)):
        optimizer.zero_grad()
        tower.backward(loss_of(model, tower.batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    towers.average()


@refused(UsageError, "shares part of its graph", "inside the loop")
def a_prompt_encoded_before_the_loop(job):
    model, encoder = net(), nn.Sequential(nn.Linear(2, 6), nn.Tanh())
    towers = Towers(model, 7, job=job, also=encoder)
    prompt = encoder(torch.ones(1, 2))
    for tower in towers(batch_of(0)):
        tower.backward(F.cross_entropy(model(tower.batch["x"] * prompt), tower.batch["y"]))
    towers.average()


@refused(UsageError, "count requires grad", "pass their sum")
def two_losses_for_a_sum_and_its_count(job):
    model = net()

    def losses(model, batch):
        return samestep.LossSum(loss_of(model, batch), penalty(model))

    Step(Towers(model, 5, job=job), losses, torch.optim.SGD(model.parameters(), 0.1))(batch_of(0))


@refused(UsageError, "tuple of 2", "without metrics", "samestep.LossSum(total, count)")
def a_loss_and_its_accuracy(job):
    model = net()

    def loss_and_accuracy(model, batch):
        found = model(batch["x"])
        return F.cross_entropy(found, batch["y"]), (found.argmax(1) == batch["y"]).sum()

    Step(Towers(model, 7, job=job), loss_and_accuracy, torch.optim.SGD(model.parameters(), 0.1))(batch_of(0))


@refused(BatchError, "samestep.Whole", "modified after the step began")
def a_mask_that_decays_in_each_pass(job):
    model = net()
    towers = Towers(model, 7, job=job)
    for tower in towers({**batch_of(0), "mask": samestep.Whole(torch.ones(6))}):
        mask = tower.batch["mask"].mul_(0.9)
        tower.backward(F.cross_entropy(model(tower.batch["x"] * mask), tower.batch["y"]))
    towers.average()


@refused(ConfigError, "ReduceLROnPlateau", "metrics", "after the step")
def a_scheduler_that_needs_a_metric(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    Step(Towers(model, 5, job=job), loss_of, optimizer, scheduler=scheduler)


@refused(ConfigError, "LBFGS", "closure")
def an_optimizer_that_needs_a_closure(job):
    model = net()
    Step(Towers(model, 5, job=job), loss_of, torch.optim.LBFGS(model.parameters()))


@refused(ConfigError, "model is a list", "nn.ModuleList")
def two_models_in_a_list(job):
    Towers([net(), net()], 5, job=job)


# ---- models that somebody else averages --------------------------------------------------------------


def test_a_model_in_distributed_data_parallel_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(ConfigError, match=r"DistributedDataParallel.*model\.module"):
            Towers(model, 4)
        with pytest.raises(ConfigError, match=r"0 is a DistributedDataParallel"):
            Towers(nn.Sequential(model), 4)
    finally:
        dist.destroy_process_group()


class Noise(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.own = generator

    def forward(self, x):
        if isinstance(self.own, torch.Generator):
            return x + torch.randn(x.shape, generator=self.own)
        return x * float(self.own.random())


@pytest.mark.parametrize(
    "generator",
    [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)],
    ids=lambda generator: type(generator).__name__,
)
def test_a_module_that_draws_from_a_generator_of_its_own_is_told_of(generator):
    model = nn.Sequential(Noise(generator), net())
    towers = Towers(model, 5)
    with pytest.warns(UserWarning, match=r"a pass drew from own of 0.*global generators") as warned:
        run_passes(towers, batch_of(0))
    towers.average()
    assert len(warned) == 1


@pytest.mark.parametrize("generator", [torch.default_generator, random._inst, np.random.mtrand._rand])
def test_a_module_that_keeps_a_global_generator_is_not_told_of(generator):
    model = nn.Sequential(Noise(generator), net())
    towers = Towers(model, 5)
    run_passes(towers, batch_of(0))
    towers.average()


@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.zeros(2, 6))])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_models_are_refused(make):
    with pytest.raises(ConfigError, match=r"1 is a .* of torch\.jit.* pass the module that it was made from"):
        Towers(nn.Sequential(nn.Identity(), make(net())), 2)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_in_a_pass_is_refused(group_of_one):
    model = net()
    towers = Towers(model, 4, job=samestep.Job(torch.device("cpu")))
    tower = next(towers(batch_of(0)))
    loss = loss_of(model, tower.batch)
    dist.all_reduce(loss.detach())
    with pytest.raises(UsageError, match=r"Tower\(index=0.*torch\.distributed.*after average"):
        tower.backward(loss)
    for tower in towers(batch_of(0)):
        tower.backward(loss_of(model, tower.batch))
    dist.all_reduce(torch.tensor(towers.average().loss))


def run_passes_that_call(call, towers, model, batch):
    for tower in towers(batch):
        tower.backward(loss := loss_of(model, tower.batch))
        call(loss.detach())


@pytest.mark.parametrize(
    "call",
    [
        lambda group, loss: dist.all_reduce(loss, group=group),
        lambda group, loss: dist.all_gather_object([None], loss.item(), group=group),
        lambda group, loss: float(functional_collectives.all_reduce(loss, "sum", group)),
        lambda group, loss: dist.barrier(group=group),
    ],
)
def test_a_collective_of_another_group_is_refused_also_after_the_last_backward(call, group_of_one):
    model, group = net(), dist.new_group()
    towers = Towers(model, 1, job=samestep.Job(torch.device("cpu")))
    with pytest.raises(UsageError, match=r"step 0, tower 0: the loop over .* torch\.distributed \(\w+\)"):
        run_passes_that_call(partial(call, group), towers, model, batch_of(0))


def test_a_collective_after_a_backward_is_refused_in_a_step_that_is_not_followed(group_of_one):
    model = net()
    towers = Towers(model, 2, job=samestep.Job(torch.device("cpu")))
    for step in range(2):  # which are followed
        run_passes(towers, batch_of(step))
        towers.average()
    with pytest.raises(UsageError, match=r"Tower\(index=1, .*: the loop over towers .* torch\.distributed,"):
        run_passes_that_call(dist.all_reduce, towers, model, batch_of(2))


def test_a_launcher_without_init_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"samestep\.init"):
        Towers(net(), 4)
