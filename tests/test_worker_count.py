"""What programs compute from the number of workers, so that another number takes other steps: a warning."""

import argparse
import copy
import importlib
import math
import os
import random
import time
from dataclasses import asdict, dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep
from samestep import TowerLoader, Towers

from .cases import mostly_long
from .nets import batch_of, loss_of, net, run_passes
from .simulation import simulate

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 1)
DATA = TensorDataset(*batch_of(0, 60).values())


def train(towers, optimizer, batch):
    run_passes(towers, batch)
    towers.average()
    optimizer.step()


# ---- wrong -----------------------------------------------------------------------------------------


def learning_rate(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1 * job.world_size)
    train(towers, optimizer, batch_of(0))


def learning_rate_in_steps(job):
    workers = job.world_size
    scale = math.sqrt(workers)
    rate = 0.1
    rate *= scale
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), rate), batch_of(0))


def of_an_own_function(job):
    def make(parameters, base):
        return AdamW(parameters, lr=base * job.world_size, betas=(0.9, 0.99))

    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, make(model.parameters(), 1e-3), batch_of(0))


def of_arguments(job):
    args = argparse.Namespace(lr=0.1, workers=1)
    args.workers = job.world_size
    args.lr = args.lr * args.workers
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=args.lr), batch_of(0))


def parsed(job):
    args = argparse.ArgumentParser().parse_args([])
    args.lr, args.momentum = 0.1, 0.9
    args.lr *= job.world_size
    return args


def of_parsed_arguments(job):
    args = parsed(job)
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=args.lr, momentum=args.momentum), batch_of(0))


def of_a_group_of_parameters(job):
    model = net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1 * job.world_size},
        {"params": model[2].parameters()},
    ]
    train(Towers(model, 6, job=job), SGD(groups, lr=0.1), batch_of(0))


def of_a_dict(job):
    config = {"lr": 0.1 * job.world_size, "momentum": 0.9}
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), **config), batch_of(0))


def of_the_environment(job):
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.1 * world_size), batch_of(0))


def of_a_variable(job):
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else 1
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.1 * world_size), batch_of(0))


def of_torch(job):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.1 * world_size), batch_of(0))


def of_a_group(job):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] *= job.world_size
    train(Towers(model, 6, job=job), optimizer, batch_of(0))


def of_a_parameter_with_the_name_of_a_loaders(job):
    def make(parameters, num_workers):
        return SGD(parameters, lr=0.1 * num_workers)

    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, make(model.parameters(), num_workers=job.world_size), batch_of(0))


class Runner:
    def __init__(self, job, base):
        self.job, self.base = job, base
        self.model = net()
        self.towers = Towers(self.model, 6, job=job)
        self.rate = self.scaled
        self.optimizer = SGD(self.model.parameters(), lr=self.rate)

    @property
    def scaled(self):
        return self.base * self.job.world_size

    def run(self):
        train(self.towers, self.optimizer, batch_of(0))


def of_a_class(job):
    Runner(job, 0.1).run()


def schedule(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=120 // (2 * job.world_size))
    train(towers, optimizer, batch_of(0))
    scheduler.step()


def schedule_by_a_function(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) * job.world_size / 10))
    train(towers, optimizer, batch_of(0))
    scheduler.step()


def batch_size(job):
    model = net()
    towers = Towers(model, 6, job=job)
    loader = TowerLoader(DATA, 6 * job.world_size, towers)
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in loader:
        train_pairs(towers, optimizer, batch)
        break


def train_pairs(towers, optimizer, batch):
    for tower in towers(batch):
        x, y = tower.batch
        tower.backward(loss_of(towers.model, {"x": x, "y": y}))
    towers.average()
    optimizer.step()


def rows_of_a_batch(job):
    per_worker = 6
    rows = per_worker * job.world_size
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.1), batch_of(0, rows))


def torch_loader(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=6 * job.world_size, shuffle=False)
    for _number, batch in enumerate(loader):
        train_pairs(towers, optimizer, batch)
        break


def sampler_of_torch(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(DATA) if dist.is_initialized() else None
    for batch in DataLoader(DATA, batch_size=6, sampler=sampler):
        train_pairs(towers, optimizer, batch)
        break


def number_of_towers(job):
    model = net()
    towers = Towers(model, 2 * job.world_size, job=job)
    train(towers, SGD(model.parameters(), lr=0.1), batch_of(0))


def size_of_a_layer(job):
    hidden = 8 * job.world_size
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.LazyLinear(3))
    model(batch_of(0)["x"])
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.1), batch_of(0))


def number_that_is_chosen(job):
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=0.2 if job.world_size > 1 else 0.1), batch_of(0))


def number_in_a_branch(job):
    args = argparse.Namespace(lr=0.1)
    if job.world_size > 1:
        args.lr *= 2
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=args.lr), batch_of(0))


def rate_of(job):
    if job.world_size > 1:
        return 0.2
    rate = 0.1
    return rate  # noqa: RET504


def number_that_a_function_returns(job):
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=rate_of(job)), batch_of(0))


def threshold(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    run_passes(towers, batch_of(0))
    towers.average()
    nn.utils.clip_grad_value_(model.parameters(), 1.0 / job.world_size)
    optimizer.step()


def number_of_steps(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(6 // job.world_size):
        train(towers, optimizer, batch_of(step))


def steps_of_while(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    total = 6 // job.world_size
    while towers.step < total:
        train(towers, optimizer, batch_of(towers.step))


def step_object(job):
    model = net()
    towers = Towers(model, 6, job=job)
    step = samestep.Step(towers, loss_of, SGD(model.parameters(), lr=0.1), clip_norm=1.0 / job.world_size)
    step(batch_of(0))


def sharded(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = samestep.ShardedOptimizer(towers, AdamW, lr=1e-3 * job.world_size)
    train(towers, optimizer, batch_of(0))


def gradient(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    run_passes(towers, batch_of(0))
    towers.average()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= job.world_size
    optimizer.step()


def of_an_added_group(job):
    model = net()
    optimizer = SGD(model[0].parameters(), lr=0.1)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1 * job.world_size})
    train(Towers(model, 6, job=job), optimizer, batch_of(0))


def of_an_item(job):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    [group.__setitem__("lr", 0.1 * job.world_size) for group in optimizer.param_groups]
    train(Towers(model, 6, job=job), optimizer, batch_of(0))


class Warmup:
    """Goes from a learning rate to its multiple."""

    def __init__(self, optimizer, workers):
        self.optimizer, self.workers, self.steps = optimizer, workers, 0

    def step(self):
        self.steps += 1
        factor = 1 + (self.workers - 1) * min(1, self.steps / 3)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * factor


def schedule_of_an_own_class(job):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    towers = Towers(model, 6, job=job)
    step = samestep.Step(towers, loss_of, optimizer, scheduler=Warmup(optimizer, job.world_size))
    step(batch_of(0))


def seed_of_layers(job):
    torch.manual_seed(3 * job.world_size + job.rank)
    model = net()
    train(Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1), batch_of(0))


def seed_of_a_generator(job):
    model = net()
    generator = random.Random()
    generator.seed(job.world_size)
    train(Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1), batch_of(generator.randrange(9)))


WRONG = {
    gradient: "a gradient",
    of_an_added_group: "a learning rate",
    of_an_item: "a learning rate",
    schedule_of_an_own_class: "a learning rate",
    seed_of_layers: "a seed",
    seed_of_a_generator: "a seed",
    learning_rate: "lr of SGD",
    learning_rate_in_steps: "lr of SGD",
    of_an_own_function: "lr of AdamW",
    of_arguments: "lr of SGD",
    of_parsed_arguments: "lr of SGD",
    of_a_group_of_parameters: "params of SGD",
    of_a_dict: "lr of SGD",
    of_the_environment: "lr of SGD",
    of_a_variable: "lr of SGD",
    of_torch: "lr of SGD",
    of_a_group: "a learning rate",
    of_a_parameter_with_the_name_of_a_loaders: "lr of SGD",
    of_a_class: "lr of SGD",
    schedule: "total_steps of OneCycleLR",
    schedule_by_a_function: "lr_lambda of LambdaLR",
    batch_size: "batch_size of TowerLoader",
    rows_of_a_batch: "batch of Towers",
    torch_loader: "the loop over steps",
    sampler_of_torch: "the batches of the loop",
    number_of_towers: "num_towers of Towers",
    size_of_a_layer: "out_features of Linear",
    number_that_is_chosen: "lr of SGD",
    number_in_a_branch: "lr of SGD",
    number_that_a_function_returns: "lr of SGD",
    threshold: "clip_value of clip_grad_value_",
    number_of_steps: "the loop over steps",
    steps_of_while: "the loop over steps",
    step_object: "clip_norm of Step",
    sharded: "lr of ShardedOptimizer",
}


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_it_is_named(program, num_workers):
    with pytest.warns(UserWarning, match=f"computed from the number of workers: {WRONG[program]} ") as caught:
        outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
    assert {str(each.message).count("line") for each in caught} == {1}


HELPERS = """
from torch.optim import SGD

def maker(world_size):
    def make(parameters):
        rate = 0.1 * world_size
        return SGD(parameters, lr=rate)

    return make
"""


def test_a_function_of_another_file_is_named_with_its_file(tmp_path, monkeypatch):
    (tmp_path / "helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    helpers = importlib.import_module("helpers")

    def program(job):
        model = net()
        make = helpers.maker(job.world_size)
        train(Towers(model, 6, job=job), make(model.parameters()), batch_of(0))

    with pytest.warns(UserWarning, match=r"lr of SGD \(helpers.py, line 7\)"):
        assert simulate(program, 2)[0].error is None


# ---- right -----------------------------------------------------------------------------------------


@dataclass
class Config:
    """What a program keeps in one place."""

    lr: float = 0.1
    world_size: int = 1


def kept_beside(job):
    config = Config(lr=0.1, world_size=job.world_size)
    more = {"rows": 12, "world_size": job.world_size}
    args = argparse.Namespace(momentum=0.9, workers=job.world_size)
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=config.lr, momentum=args.momentum)
    train(towers, optimizer, batch_of(0, more["rows"]))
    again = argparse.Namespace(**{**vars(args), **more, "lr": 0.1})
    merged = copy.copy(again)
    train(towers, SGD(model.parameters(), lr=again.lr), batch_of(1, merged.rows))
    return f"{more.get('rows') / more['world_size']} rows a worker"


class Keeping:
    """A program in a class, which merges what it was given."""

    num_steps = 2

    def __init__(self, config, given, job):
        merged = {**asdict(config), **given}
        self.config = Config(**{name: value for name, value in merged.items() if name != "rank"})
        self.job, self.model, self.best = job, net(), 0.0
        self.towers = Towers(self.model, 6, job=job)
        self.loader = TowerLoader(DATA, 6 * self.num_steps, self.towers)
        self.optimizer = SGD(self.model.parameters(), lr=self.config.lr)
        self.schedule = LambdaLR(self.optimizer, lambda step: 0.9 ** (step // self.num_steps))

    def run(self):
        for _epoch in range(self.num_steps):
            for batch in self.loader:
                train_pairs(self.towers, self.optimizer, batch)
            self.schedule.step()


def merged(job):
    given = {"lr": 0.2, "world_size": job.world_size, "rank": job.rank}
    Keeping(Config(0.1, job.world_size), given, job).run()


def threads_and_processes(job):
    model = net()
    towers = Towers(model, 6, job=job)
    loader = TowerLoader(DATA, 12, towers, num_workers=0 // job.world_size)
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in loader:
        train_pairs(towers, optimizer, batch)
        break


def other_ways(job):
    model = net()
    towers = Towers(model, 6, job=job)
    if job.world_size > 1:
        threads = 2
        optimizer = samestep.ShardedOptimizer(towers, SGD, lr=0.1)
    else:
        threads = 1
        optimizer = SGD(model.parameters(), lr=0.1)
    assert threads <= (4 if job.world_size > 1 else 2)
    step = samestep.Step(towers, loss_of, optimizer)
    for number in range(2):
        report = step(batch_of(number))
        if job.is_first and number % job.world_size == 0:
            _speed = report.loss * 12 / job.world_size


def per_worker_evaluation(job):
    model = net()
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(towers, optimizer, batch_of(0))
    for _worker in range(job.world_size):
        model(batch_of(7, 12)["x"])
    train(towers, optimizer, batch_of(1))


def needs_few_workers(job):
    if job.world_size > 8:
        print("at most 8 workers")
        return
    rate = 0.1
    model = net()
    towers = Towers(model, 6, job=job)
    train(towers, SGD(model.parameters(), lr=rate), batch_of(0))


def seeds(job):
    torch.manual_seed(time.time_ns() % 2**32 + job.rank)  # layers get worker 0's weights
    model = net()
    random.seed(*[0])
    order = random.Random()
    order.seed(7)
    train(Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1), batch_of(order.randrange(9)))


def own_schedule(job):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    towers = Towers(model, 6, job=job)
    samestep.Step(towers, loss_of, optimizer, scheduler=Warmup(optimizer, 3))(batch_of(0))


RIGHT = [
    seeds,
    own_schedule,
    kept_beside,
    merged,
    threads_and_processes,
    other_ways,
    per_worker_evaluation,
    needs_few_workers,
]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_what_changes_no_step_is_not(program, num_workers):
    outcomes = simulate(program, num_workers)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
