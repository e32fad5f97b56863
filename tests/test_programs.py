"""Ordinary PyTorch programs: the same bits on 1, 2 and 3 simulated workers."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import samestep
from samestep import Step, Towers

from .cases import mostly_long, with_long
from .nets import batch_of, loss_of, take_step
from .simulation import values

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


@program
def generator_and_discriminator(job):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    of_generator, of_discriminator = Towers(generator, 4, job=job), Towers(discriminator, 4, job=job, seed=1)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, discriminator)]
    for step in range(3):
        batch = batch_of(step)["x"]
        for tower in of_discriminator(batch):
            fake = generator(torch.randn_like(tower.batch)).detach()
            real = F.softplus(-discriminator(tower.batch)).mean()
            tower.backward(real + F.softplus(discriminator(fake)).mean())
        of_discriminator.average()
        optimizers[1].step()
        for tower in of_generator(batch):
            fake = generator(torch.randn_like(tower.batch))
            tower.backward(F.softplus(-discriminator(fake)).mean())
        of_generator.average()
        optimizers[0].step()
    return samestep.digest(generator) + samestep.digest(discriminator)


@program
def mixed_precision_by_hand(job):
    model = classifier()
    towers = Towers(model, 5, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        for tower in towers(batch_of(step), scaler=scaler):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, tower.batch)
            tower.backward(loss)
        towers.average()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return samestep.digest(model)


@program
def gradual_unfreezing(job):
    model = classifier()
    step = Step(
        Towers(model, 5, job=job), loss_of, torch.optim.AdamW(model.parameters(), 0.01), clip_norm=1.0
    )
    model[:2].requires_grad_(False)
    for number in range(5):
        if number == 2:
            model[:2].requires_grad_(True)
        step(batch_of(number))
    return samestep.digest(model)


@program
def a_compiled_model(job):
    model = torch.compile(classifier(), backend="eager")
    step = Step(Towers(model, 5, job=job), loss_of, torch.optim.AdamW(model.parameters(), 0.01))
    for number in range(3):
        step(batch_of(number))
    return samestep.digest(model)


@program
def pruning(job):
    model = classifier()
    towers = Towers(model, 5, job=job)
    for step in range(4):
        if step == 2:
            prune.l1_unstructured(model[0], "weight", 0.5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        take_step(towers, batch_of(step))
        optimizer.step()
    return samestep.digest(model)


class Adapter(nn.Module):
    """A frozen linear layer with a trainable product of rank 2 beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@program
def adapters_inserted_after_pretraining(job):
    model = classifier()
    towers = Towers(model, 5, job=job)
    step = Step(towers, loss_of, torch.optim.SGD(model.parameters(), 0.1))
    for number in range(2):
        step(batch_of(number))
    model[0], model[4] = Adapter(model[0]), Adapter(model[4])
    model[1].requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = Step(towers, loss_of, torch.optim.AdamW(trainable, 0.01))
    for number in range(3):
        step(batch_of(number))
    return samestep.digest(model)


@program
def a_parameter_removed_and_added_again(job):
    model = classifier()
    towers = Towers(model, 5, job=job)
    for step in range(3):
        if step == 1:
            model[4].bias = None
        if step == 2:
            model[4].bias = nn.Parameter(torch.zeros(3))
        take_step(towers, batch_of(step))
        torch.optim.SGD(model.parameters(), 0.1).step()
    return samestep.digest(model)


@program
def memory_format_changed_between_steps(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    towers = Towers(model, 5, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        for tower in towers(torch.randn(13, 3, 6, 6, generator=torch.Generator().manual_seed(step))):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()
    return samestep.digest(model)


@program
def evaluation_between_steps(job):
    model = classifier()
    step = Step(Towers(model, 5, job=job), loss_of, torch.optim.SGD(model.parameters(), 0.1))
    for number in range(4):
        step(batch_of(number))
        model.eval()
        model(batch_of(9)["x"])
        model.train()
        if number == 1:
            model[1].eval()
    return samestep.digest(model)


@program
def weights_cast_to_bfloat16_between_steps(job):
    model = classifier()
    towers = Towers(model, 5, job=job)
    for step in range(4):
        if step == 2:
            model.bfloat16()
        batch = batch_of(step)
        batch["x"] = batch["x"].to(model[0].weight.dtype)
        take_step(towers, batch)
        torch.optim.SGD(model.parameters(), 0.1).step()
    return samestep.digest(model)


LONG = {
    "adapters_inserted_after_pretraining",
    "memory_format_changed_between_steps",
    "a_parameter_removed_and_added_again",
    "pruning",
}


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
@pytest.mark.parametrize("name", with_long(PROGRAMS, LONG))
def test_any_number_of_workers_takes_the_same_steps(name, num_workers):
    if name == "a_compiled_model" and sys.version_info < (3, 12) and torch.__version__.startswith("2.11."):
        pytest.skip("torch's compiler crashes in threads of simulated workers, with these versions")
    assert len({value for num in (1, num_workers) for value in values(PROGRAMS[name], num, num)}) == 1


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def compiled_in_place(backend):
    model = Affine()
    model.compile(backend=backend, dynamic=False)
    return model, lambda x: model(x).square().mean()


def compiled_copy(backend):
    model = Affine()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    return model, lambda x: compiled(x).square().mean()


def compiled_second_model(backend):
    compiled = torch.compile(Affine(), backend=backend, dynamic=False)
    model = Affine()
    return model, lambda x: (model(x) - compiled(x).detach()).square().mean()


def compiled_loss(backend):
    model = Affine()
    return model, torch.compile(lambda x: model(x).square().mean(), backend=backend, dynamic=False)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("build", [compiled_in_place, compiled_copy, compiled_second_model, compiled_loss])
def test_compiled_code_is_compiled_once(build):
    """The watch's global hook must not cause another compilation in the steps that have it."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    model, loss_of = build(backend)
    towers = Towers(model, 12)
    for step in range(3):
        for tower in towers(torch.randn(24, 6, generator=torch.Generator().manual_seed(step))):
            tower.backward(loss_of(tower.batch))
        towers.average()
    assert len(graphs) == 1
