"""Programs with data, `collate_fn` or order of their own: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

EXAMPLES = [
    *("return x, y", "return x + 0.1 * torch.randn(6), y", "return x * random.random(), y"),
    "return x + np.random.rand(6).astype('float32'), y",
    "return x + 0.1 * torch.randn(6, generator=self.generator), y",
    "return x + self.rng.random(6).astype('float32'), y",
    "self.calls += 1\nreturn x * (1 + 0.01 * self.calls), y",
    "self.calls += 1\nreturn x, y",
    "self.seen.add(index)\nreturn x / len(self.seen), y",
    "self.seen.add(index)\nreturn x, y",
    "mixed = x + 0.1 * self.last\nself.last = x\nreturn mixed, y",
    "other = random.randrange(24)\nreturn 0.9 * x + 0.1 * self.inputs[other], y",
    "if index not in self.cache:\n    self.cache[index] = x * 2\nreturn self.cache[index], y",
    "if index not in self.cache:\n    self.cache[index] = x + torch.randn(6)\nreturn self.cache[index], y",
    "self.mean = 0.9 * self.mean + 0.1 * x\nreturn x - self.mean, y",
    "found = x - self.mean\nself.mean = self.mean + 0.1 * found\nreturn found, y",
    *("return x * self.scale, y", "return x * (1 + self.epoch), y", "return x.mul_(0.99), y"),
    "self.inputs[index] *= 0.99\nreturn x, y",
    "return x * (1 + job.rank), y",
    "if job.rank == 0:\n    self.calls += 1\nreturn x, y",
    "return x + torch.initial_seed() % 7, y",
    "held.append(index)\nreturn x, y",
    "return self.transform(x), y",
    "self.transform.strength = random.random()\nreturn self.transform(x), y",
    "return (x if random.random() < 0.5 else x.flip(0)), y",
    "weight = self.weights[index]\nself.weights[index] = weight * 0.9\nreturn x * weight, y",
    "self.order.append(index)\nreturn x + 0.01 * self.order[-1], y",
    "if len(self.order) < 3:\n    self.order.append(index)\nreturn x + self.inputs[self.order[0]], y",
    "worker = torch.utils.data.get_worker_info()\nreturn x * (1 + (worker.id if worker else 0)), y",
    "return x[: 3 + self.epoch % 3].repeat(6)[:6], y",
]
"""What `dataset[index]` does with an example."""

PARTS = "for n in range(tower, 24, num_towers):\n    x, y = example(n)\n"
WHOLE = "for n in range(24):\n    x, y = example(n)\n"

SHARDS = [
    f"{PARTS}    yield x, y",
    "numbers = list(range(tower, 24, num_towers))\nrandom.shuffle(numbers)\nyield from map(example, numbers)",
    "numbers = list(range(24))\nrandom.Random(epoch).shuffle(numbers)\n"
    "yield from map(example, numbers[tower::num_towers])",
    "numbers = list(range(24))\nown.shuffle(numbers)\nyield from map(example, numbers[tower::num_towers])",
    f"{PARTS}    yield x + 0.1 * torch.randn(6), y",
    f"{PARTS}    yield x + 0.1 * torch.randn(6, generator=generator), y",
    f"{PARTS}    state['n'] = state.get('n', 0) + 1\n    yield x * (1 + 0.01 * state['n']), y",
    f"{PARTS}    state['n'] = state.get('n', 0) + 1\n    yield x, y",
    f"count = 0\n{PARTS}    count += 1\n    yield x * (1 + 0.01 * count), y",
    f"last = torch.zeros(6)\n{PARTS}    yield x + 0.1 * last, y\n    last = x",
    f"{PARTS}    yield x + 0.1 * dataset.last, y\n    dataset.last = x",
    f"{PARTS}    dataset.mean = 0.9 * dataset.mean + 0.1 * x\n    yield x - dataset.mean, y",
    f"{PARTS}    yield x * (1 + dataset.epoch), y",
    f"{PARTS}    yield x * (1 + 0.1 * len(held)), y",
    f"{PARTS}    yield x * (1 + job.rank), y",
    "for n in range(job.rank, 24, job.world_size):\n    yield example(n)",
    f"buffer = []\n{PARTS}    buffer.append((x, y))\n    if len(buffer) > 2:\n"
    "        yield buffer.pop(random.randrange(len(buffer)))\nyield from buffer",
    f"{PARTS}    if n not in dataset.cache:\n        dataset.cache[n] = x + torch.randn(6), y\n"
    "    yield dataset.cache[n]",
    f"{PARTS}    if random.random() < 0.8:\n        yield x, y",
    f"{PARTS}    dataset.seen.add(n)\n    yield x / len(dataset.seen), y",
    "while True:\n    n = random.randrange(24)\n    yield example(n)\n    if n == 7:\n        return",
]
"""What a function does that returns a tower's shard."""

STREAMS = [
    f"{WHOLE}    yield x, y",
    "numbers = list(range(24))\nrandom.shuffle(numbers)\nyield from map(example, numbers)",
    "numbers = list(range(24))\nown.shuffle(numbers)\nyield from map(example, numbers)",
    "info = get_worker_info()\nyield from map(example, range(info.id, 24, info.num_workers))",
    "info = get_worker_info()\nnumbers = list(range(24))\nrandom.shuffle(numbers)\n"
    "yield from map(example, numbers[info.id :: info.num_workers])",
    f"{WHOLE}    self.calls += 1\n    yield x * (1 + 0.01 * self.calls), y",
    f"{WHOLE}    self.calls += 1\n    yield x, y",
    f"self.calls += 1\n{WHOLE}    yield x * (1 + 0.1 * self.calls), y",
    f"{WHOLE}    yield x + 0.1 * self.last, y\n    self.last = x",
    f"{WHOLE}    yield x * (1 + self.epoch), y",
    f"{WHOLE}    held.append(n)\n    yield x * (1 + 0.01 * len(held)), y",
    f"{WHOLE}    yield x * (1 + job.rank), y",
    "for n in range(job.rank, 24, job.world_size):\n    yield example(n)",
    f"{WHOLE}    yield x + 0.1 * torch.randn(6, generator=generator), y",
    "for n in self.numbers:\n    yield example(n)",
]
"""What an `IterableDataset` does."""

COLLATED = [
    *[None] * 8,
    "return x, y",
    "lam = np.random.beta(1, 1)\nreturn (lam * x + (1 - lam) * x.flip(0)).float(), y",
    *("return x * torch.rand(()), y", "return x * torch.rand((), generator=generator), y"),
    "state['n'] = state.get('n', 0) + 1\nreturn x * (1 + 0.01 * state['n']), y",
    "state['n'] = state.get('n', 0) + 1\nreturn x, y",
    "state.setdefault('first', x.mean())\nreturn x - state['first'], y",
    "previous = state.get('x', torch.zeros(6))\nstate['x'] = x[0].clone()\nreturn x + 0.1 * previous, y",
    *("return x - x.mean(0), y", "return x * (1 + state.get('step', 0)), y", "return x * (1 + job.rank), y"),
    "items.sort(key=lambda each: float(each[0].sum()))\nreturn default_collate(items)",
    "random.shuffle(items)\nreturn default_collate(items)",
    "memory[: len(x)] = x\nreturn memory[: len(x)], y",
]
"""What `collate_fn` does with a tower's examples."""

ORDERS = [
    *["shuffle=True"] * 4,
    *("shuffle=False", "drop_last=True", "order=lambda seed, epoch: torch.randperm(24)"),
    "order=lambda seed, epoch: WeightedRandomSampler([1.0 + n for n in range(24)], 24)",
    "order=lambda seed, epoch: torch.randperm(24, generator=generator)",
    "order=lambda seed, epoch: sorted(range(24), key=lambda n: float(dataset.weights[n]))",
    "order=lambda seed, epoch: sorted(range(24), key=lambda n: float(dataset.inputs[n].sum()))",
    "order=lambda seed, epoch: [n for n in range(24) if n % 3 != job.rank] + [0] * 8",
    "order=lambda seed, epoch: random.sample(range(24), 24)",
    "order=lambda seed, epoch: own.sample(range(24), 24)",
]

IN_PASSES = [
    *["pass"] * 6,
    *("dataset.scale = dataset.scale * 0.99", "dataset.scale = float(x.abs().mean())", "dataset.calls = 0"),
    *("dataset.weights[0] *= 0.9", "dataset.cache.clear()", "state['step'] = step", "held.clear()"),
    *("held.append(float(x.sum()))", "dataset.epoch = dataset.epoch + 1"),
    *("dataset.mean = dataset.mean + 0.1 * x.mean(0)", "x = x * (1 + 0.1 * random.random())"),
    *("x = x * dataset.scale", "x = x - dataset.mean", "x = x * (1 + dataset.calls)"),
    *("x = x * (1 + 0.1 * len(held))", "x = x * (1 + 0.1 * len(dataset.seen))"),
    *("x = x + 0.1 * dataset.inputs[random.randrange(24)]", "x = x + 0.1 * dataset[3][0]"),
    *("x = x + 0.1 * next(others)", "x = x + 0.1 * dataset.last"),
]
"""What passes do between batch and forward."""

RATE = "for group in optimizer.param_groups:\n    group['lr'] = 0.1 / (1 + {})"

BETWEEN = [
    *["pass"] * 8,
    *("dataset.scale = 1 / (step + 1)", "dataset.scale = report.loss", "dataset.epoch = step"),
    *("dataset.calls = 0", "dataset.cache.clear()", "dataset.mean = dataset.mean * 0.5", "held.clear()"),
    *("state['step'] = step", "dataset.generator.manual_seed(step)", "dataset.seen.clear()"),
    *("if job.rank == 0:\n    dataset.scale = 0.5", "if float(loss) > 1:\n    dataset.scale = 0.5"),
    *("if step == 1:\n    break", "torch.rand(int(random.random()))"),
    *map(RATE.format, ("dataset.calls", "len(held)", "batch.rows", "len(batch.slices)")),
]
"""What the program does between two steps."""

PROGRAM = """import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data import default_collate, get_worker_info

import samestep


class Strength:
    strength = 1.0

    def __call__(self, x):
        return x * self.strength


def program(job):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator, own = torch.Generator().manual_seed(0), random.Random(0)
    held, state, memory, step = [], {{}}, torch.empty(24, 6), 0

    class Data(Dataset):
        def __init__(self):
            made = torch.Generator().manual_seed(3)
            self.inputs = torch.randn(24, 6, generator=made)
            self.labels = torch.randint(3, (24,), generator=made)
            self.generator, self.rng = torch.Generator().manual_seed(1), np.random.default_rng(0)
            self.calls, self.epoch, self.scale = 0, 0, 1.0
            self.seen, self.cache, self.order = set(), {{}}, []
            self.last, self.mean, self.weights = torch.zeros(6), torch.zeros(6), torch.ones(24)
            self.transform = Strength()

        def __len__(self):
            return 24

        def __getitem__(self, index):
            x, y = self.inputs[index], self.labels[index]
{example}

    def example(n):
        return dataset.inputs[n], dataset.labels[n]

    class Stream(IterableDataset):
        def __init__(self):
            self.calls, self.epoch, self.last, self.numbers = 0, 0, torch.zeros(6), iter(range(24))

        def __iter__(self):
{streamed}

    def make_shard(tower, num_towers, epoch, seed):
{shard}

    def collate(items):
        x, y = default_collate(items)
{collated}

    dataset, stream = Data(), Stream()
    loader = samestep.{loader}({source}, {rows}, towers, {options})
    others = iter(torch.arange(1000.0))
    while towers.step < 6:
        for batch in loader:
            for tower in towers(batch):
                x, y = tower.batch
{in_pass}
                loss = F.cross_entropy(model(x), y)
                tower.backward(loss)
            report = towers.average()
            optimizer.step()
            step = towers.step
{between}
        if step == 1:
            break
    return samestep.digest(model)
"""


def written(seed):
    """Return the code of a program with data of its own."""
    draw = random.Random(seed)
    source, collated = draw.choice(["dataset", "dataset", "make_shard", "stream"]), draw.choice(COLLATED)
    options = [draw.choice(ORDERS)] if source == "dataset" else []
    if collated:
        options.append("collate_fn=collate")
    if draw.random() < 0.1:
        options.append(f"num_workers={draw.choice([1, 2])}")
    return PROGRAM.format(
        num_towers=draw.choice([3, 4, 6]),
        rows=draw.choice([9, 10, 12]),
        loader="TowerLoader" if source == "dataset" else "StreamLoader",
        source=source,
        options=", ".join(options),
        example=indent(draw.choice(EXAMPLES), " " * 12),
        streamed=indent(draw.choice(STREAMS), " " * 12),
        shard=indent(draw.choice(SHARDS), " " * 8),
        collated=indent(collated or "return x, y", " " * 8),
        in_pass=indent(draw.choice(IN_PASSES), " " * 16),
        between=indent(draw.choice(BETWEEN), " " * 12),
    )


@pytest.mark.parametrize("seed", seeds(300, 0))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"loaders_{seed}.py")
