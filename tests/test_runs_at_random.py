"""Runs at random: the weights of a plain loop over whole batches, with one digest on any number of workers.

A run that is saved on some workers and continues on others has this digest, too.
"""

import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import samestep
from samestep import AbandonedError, Placement, ShardedOptimizer, TowerLoader, Towers

from .cases import seeds
from .simulation import values

STEPS = 6


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(3, 5, batch_first=True, bidirectional=True), nn.Linear(10, 4)

    def forward(self, x):
        return self.head(self.cells(x.view(-1, 4, 3))[0][:, -1])


class Tokens(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.embedding((4 * x.abs()).long().clamp(max=15)).mean(1))


class Odd(nn.Module):
    """Has complex, tied, scalar and unused parameters."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(12, 12, dtype=torch.complex128))
        self.first, self.second, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(12, 4)

    def forward(self, x):
        mixed = (x.to(self.waves.dtype) @ self.waves).abs() * self.scale
        return self.head(self.second(self.first(mixed).tanh()))


def pictures():
    first = nn.Conv1d(3, 6, 3, padding=1)
    return nn.Sequential(nn.Unflatten(1, (3, 4)), first, nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 4))


def frozen_norm():
    return nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9).eval(), nn.Tanh(), nn.Linear(9, 4))


def cross_entropies(out, y):
    return F.cross_entropy(out, y, reduction="none")


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
MODELS = {
    "perceptron": lambda: nn.Sequential(weight_norm(nn.Linear(12, 9)), nn.Tanh(), nn.Linear(9, 4)),
    "pictures": pictures,
    "frozen norm": frozen_norm,
    "recurrent": Recurrent,
    "tokens": lambda: Tokens(sparse=False),
    "sparse tokens": lambda: Tokens(sparse=True),
    "odd": Odd,
}
LOSSES = {  # sums over rows, and what each is divided by
    "mean": [(lambda out, y: cross_entropies(out, y).sum(), len)],
    "masked": [(lambda out, y: (cross_entropies(out, y) * (y != 0)).sum(), lambda y: (y != 0).sum())],
    "weighted": [
        (lambda out, y: (cross_entropies(out, y) * CLASS_WEIGHTS[y]).sum(), lambda y: CLASS_WEIGHTS[y].sum())
    ],
    "two": [
        (lambda out, y: cross_entropies(out, y).sum(), len),
        (lambda out, y: out[y == 1].square().sum(), lambda y: (y == 1).sum()),
    ],
    "seldom": [(lambda out, y: (cross_entropies(out, y) * (y == 3)).sum(), lambda y: (y == 3).sum())],
}
ELEMENTWISE = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AMSGrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.003, "momentum": 0.5}),
}
SPARSE = {
    "plain SGD": (torch.optim.SGD, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
SCHEDULERS = {
    "none": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 1.0),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3)),
}
LOADERS = {
    "shuffled": lambda data, rows, towers: TowerLoader(data, rows, towers, seed=1),
    "in order": lambda data, rows, towers: TowerLoader(data, rows, towers, shuffle=False),
    "whole batches": lambda data, rows, towers: TowerLoader(data, rows, towers, drop_last=True),
    "weighted": lambda data, rows, towers: TowerLoader(
        data,
        rows,
        towers,
        order=lambda seed, epoch: WeightedRandomSampler(torch.arange(1.0, len(data) + 1), len(data)),
    ),
    "a DataLoader's": lambda data, rows, towers: TowerLoader.from_dataloader(
        DataLoader(data, batch_size=rows, shuffle=True), towers
    ),
}


def chosen(seed):
    """Return what a run consists of."""
    chance = random.Random(seed)
    run = SimpleNamespace(seed=seed, model=chance.choice([*MODELS]))
    run.is_sparse = run.model == "sparse tokens"
    run.rule, run.options = chance.choice([*(SPARSE if run.is_sparse else ELEMENTWISE).values()])
    run.is_sharded = not run.is_sparse and chance.random() < 0.3
    run.loss = chance.choice([*LOSSES])
    run.scheduler = chance.choice([*SCHEDULERS])
    run.loader = chance.choice([*LOADERS])
    run.num_towers, run.rows = chance.choice([3, 5, 7]), chance.choice([8, 9, 14])
    run.examples = chance.choice([23, 31, 40])
    run.is_step = run.is_sharded or chance.random() < 0.5
    run.clip_norm = None if run.is_sparse else chance.choice([None, 0.3])
    run.frozen = range(*chance.choice([(0, 0), (1, 3), (2, STEPS)]))
    run.abandoned = chance.choice([None, 0, 2])
    run.has_temperature, run.moves_towers = chance.random() < 0.3, chance.random() < 0.3
    run.bucket_bytes, run.noise_every = chance.choice([64, 1000, 2**22]), chance.choice([0, 1, 20])
    run.saved, run.workers = chance.randrange(1, STEPS), chance.choices([1, 2, 3], k=2)
    return run


class Parts:
    """What a run trains, and how; the same with and without towers."""

    def __init__(self, run, job=None):
        self.run = run
        torch.manual_seed(run.seed)
        inputs = torch.randn(run.examples, 12, dtype=torch.float64)
        labels = torch.multinomial(torch.tensor([0.4, 0.35, 0.2, 0.05]), run.examples, replacement=True)
        self.data = TensorDataset(inputs, labels, torch.arange(run.examples))
        self.model = MODELS[run.model]().double()
        self.temperature = nn.Parameter(torch.ones(4, dtype=torch.float64)) if run.has_temperature else None
        self.trained = [*self.model.parameters(), *([self.temperature] if run.has_temperature else [])]
        if job is not None:
            self.towers = self.make_towers(job)
        if job is not None and run.is_sharded:
            self.optimizer = ShardedOptimizer(self.towers, run.rule, **run.options)
        else:
            self.optimizer = run.rule(self.trained, **run.options)
        self.scheduler = SCHEDULERS[run.scheduler](self.optimizer)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def make_towers(self, job):
        run = self.run
        return Towers(
            self.model,
            run.num_towers,
            job=job,
            also=self.temperature,
            on_zero_count="skip",
            bucket_bytes=run.bucket_bytes,
            noise_every=run.noise_every,
        )

    def freeze(self, step):
        next(self.model.parameters()).requires_grad_(step not in self.run.frozen)

    def outputs(self, inputs):
        outputs = self.model(inputs)
        return outputs if self.temperature is None else outputs * self.temperature

    def update(self):
        if self.run.clip_norm is not None:
            clip_grad_norm_(self.trained, self.run.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.averaged.update_parameters(self.model)

    def weights(self):
        state = {"temperature": self.temperature} if self.run.has_temperature else {}
        return {**self.model.state_dict(), **self.averaged.state_dict(), **state}


def train_plainly(run, examples):
    """Train on the whole batches with these examples, as a loop without towers does."""
    parts = Parts(run)
    for step, numbers in enumerate(examples):
        parts.freeze(step)
        parts.optimizer.zero_grad()
        inputs, labels, _ = parts.data[numbers]
        outputs = parts.outputs(inputs)
        terms = [(total(outputs, labels), count(labels)) for total, count in LOSSES[run.loss]]
        means = [total / count for total, count in terms if count]
        if means:
            sum(means).backward()
            parts.update()
    return parts.weights()


class Training(Parts):
    """A run with towers."""

    def __init__(self, run, job):
        super().__init__(run, job)
        self.loader = LOADERS[run.loader](self.data, run.rows, self.towers)
        terms = LOSSES[run.loss]
        counts = {str(n): (lambda batch, count=count: count(batch[1])) for n, (_, count) in enumerate(terms)}
        self.counts = counts if len(terms) > 1 else None
        self.step = samestep.Step(
            self.towers,
            self.loss,
            self.optimizer,
            clip_norm=run.clip_norm,
            scheduler=self.scheduler,
            averaged_model=self.averaged,
            counts=self.counts,
        )
        self.chance, self.seen = random.Random(5), []
        names = ("model", "towers", "loader", "optimizer", "scheduler")
        self.state = {name: getattr(self, name) for name in names} | {"averaged_model": self.averaged}

    def loss(self, model, batch):
        inputs, labels, numbers = batch
        self.seen.append(numbers)
        outputs = self.outputs(inputs)
        sums = {str(n): total(outputs, labels) for n, (total, _) in enumerate(LOSSES[self.run.loss])}
        return sums if len(sums) > 1 else samestep.LossSum(sums["0"], LOSSES[self.run.loss][0][1](labels))

    def until(self, last):
        """Train; return the examples of each step."""
        examples = []
        while self.towers.step < last:
            for batch in self.loader:
                self.prepare(batch)
                self.seen.clear()
                self.step(batch) if self.run.is_step else self.take(batch)
                examples.append(torch.cat(self.towers.gather(self.seen)))
                if self.towers.step == last:
                    break
        return examples

    def prepare(self, batch):
        """Change what may change between two steps."""
        self.freeze(self.towers.step)
        if self.run.moves_towers:
            num_workers = self.towers.job.world_size
            cuts = sorted(self.chance.sample(range(1, self.run.num_towers), num_workers - 1))
            self.towers.placement = Placement((0, *cuts, self.run.num_towers))
        if self.towers.step == self.run.abandoned:
            with suppress(AbandonedError):  # another worker may be the first to leave the step
                for tower in self.towers(batch):
                    tower.backward(self.outputs(tower.batch[0]).square().mean())
                    break
            self.towers.abandon()

    def take(self, batch):
        """Take a step, as a loop without `Step` does."""
        for tower in self.towers(batch, counts=self.counts):
            found = self.loss(self.model, tower.batch)
            tower.backward(found) if self.counts else tower.backward_sum(found.total, found.count)
        if not self.towers.average().skipped:
            self.update()

    def digests(self):
        return samestep.digest(self.model), samestep.digest(self.averaged)


@pytest.mark.filterwarnings("ignore:.*the checkpoint was saved with")  # a layer thawed in the step after it
@pytest.mark.parametrize("seed", seeds(80, 1))
def test_the_weights_are_those_of_a_plain_loop_on_any_number_of_workers(seed, tmp_path):
    run = chosen(seed)

    def work(job):
        training = Training(run, job)
        return training.until(STEPS), training.weights(), training.digests()

    def save(job):
        training = Training(run, job)
        training.until(run.saved)
        samestep.save(tmp_path, **training.state)

    def resume(job):
        training = Training(run, job)
        samestep.load(tmp_path, **training.state)
        training.until(STEPS)
        return training.digests()

    [(examples, weights, digests)] = values(work, 1, seed)
    torch.testing.assert_close(weights, train_plainly(run, examples), rtol=1e-7, atol=1e-9)
    for num_workers in (2, 3):
        assert {found for *_, found in values(work, num_workers, seed)} == {digests}
    if run.model != "odd":  # safetensors has no complex128
        values(save, run.workers[0], seed)
        assert {*values(resume, run.workers[1], seed)} == {digests}
