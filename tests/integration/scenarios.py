"""Small training runs, each ending in a digest: run in one process and in several, and compared.

python scenarios.py OUT [DEVICE]    run all of them as a worker of torchrun; worker N writes OUT.N
"""

import itertools
import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.checkpoint.files import read, write
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import restore, take_snapshot
from samestep.recipes.digits.data import Digits
from samestep.recipes.segmentation.label_maps import LabelMaps
from samestep.recipes.segmentation.recipe import SegmentationSettings
from samestep.streams import seed_globals
from samestep.summation.placement import Placement
from samestep.workers.agreement import from_first_worker

Scenario = Callable[[samestep.Job], str]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batches(
    num_steps: int, rows: int, *shape: int, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows if step != 1 else rows // 2 + 1, *shape, generator=generator).to(dtype),
            "y": torch.randint(0, 5, (rows if step != 1 else rows // 2 + 1,), generator=generator),
        }
        for step in range(num_steps)
    ]


def convnet() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.BatchNorm2d(6, momentum=None),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    ).to(memory_format=torch.channels_last)


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 5)).to(dtype)


def every_norm() -> nn.Module:
    torch.manual_seed(9)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6, affine=False),
        nn.InstanceNorm2d(6, track_running_stats=True),
        nn.Unflatten(2, (2, 4)),
        nn.BatchNorm3d(6, momentum=None),
        nn.InstanceNorm3d(6, track_running_stats=True, affine=True, momentum=0.3),
        nn.Flatten(2),
        nn.BatchNorm1d(6),
        nn.InstanceNorm1d(6, track_running_stats=True),
        nn.BatchNorm1d(6).eval(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 64, 5),
    )
    model(torch.randn(2, 3, 8, 8))
    return model


def spectral() -> nn.Module:
    torch.manual_seed(10)
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, stride=2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.utils.spectral_norm(nn.Linear(36, 20), n_power_iterations=2),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(20, 5)),
    )


class Memories(nn.Module):
    """Buffers that a forward changes: a codebook, a queue, flags, a moving average, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.linear = nn.Linear(21, 5)
        self.register_buffer("codes", torch.randn(5, 7))
        self.register_buffer("queue", torch.zeros(12, 7))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = torch.cdist(x, self.codes).argmin(1)
            members = F.one_hot(nearest, 5).to(x.dtype)
            self.codes += 0.1 * (members.t() @ x)
            self.seen |= members.any(0)
            for row in x:
                self.queue[int(self.place)] = row
                self.place[0] = (self.place[0] + 1) % len(self.queue)
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean()
            self.passes = self.passes + 1
        hidden = [x / self.scale, self.codes[nearest] * self.seen.sum(), self.queue.mean(0).expand_as(x)]
        return self.linear(torch.cat(hidden, 1) + self.passes)


MEMORIES = {"codes": "mean", "scale": "mean", "queue": "first", "place": "first", "seen": "first"}


@dataclass(frozen=True)
class Run:
    """One small training run."""

    num_towers: int
    build: Callable[[], nn.Module] = convnet
    rows: int = 30
    shape: tuple[int, ...] = (3, 8, 8)
    optimizer: str = "sgd"
    autocast: torch.dtype | None = None
    statistics: str = "mean"
    buffers: Mapping[str, str] = field(default_factory=dict)
    bucket_bytes: int = 4000
    dtype: torch.dtype = torch.float32
    accumulate_dtype: torch.dtype | None = None

    def __call__(self, job: samestep.Job) -> str:
        model = self.build().to(job.device)
        towers = samestep.Towers(
            model,
            self.num_towers,
            job=job,
            seed=3,
            statistics=self.statistics,
            buffers=self.buffers,
            bucket_bytes=self.bucket_bytes,
            accumulate_dtype=self.accumulate_dtype,
        )
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        step = samestep.Step(
            towers,
            loss_of,
            optimizer,
            clip_norm=1.0,
            autocast=self.autocast,
            scheduler=schedule,
            averaged_model=average,
        )
        losses = [step(batch).loss for batch in batches(3, self.rows, *self.shape, dtype=self.dtype)]
        buffers = samestep.digest(dict(model.named_buffers()))  # those that the model does not save, too
        return f"{samestep.digest(model)} {samestep.digest(average)} {buffers} {losses}"


def wide_gradients() -> nn.Module:
    """Return bfloat16 parameters whose gradients are float32."""
    model = perceptron(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


mlp = partial(Run, build=perceptron, shape=(7,), rows=48)
RUNS = {
    **{f"convnet, {towers} towers": Run(towers) for towers in (4, 7, 16)},
    **{f"perceptron, {towers} towers": mlp(towers, optimizer="adamw") for towers in (4, 7, 8, 13)},
    "one bucket": Run(7, bucket_bytes=2**25),
    "pooled statistics": Run(7, statistics="pooled"),
    "first tower's statistics": Run(7, statistics="first"),
    **{
        f"every norm, {mode}": Run(7, every_norm, 10, statistics=mode) for mode in ("mean", "pooled", "first")
    },
    "spectral norm": Run(7, spectral, 10, buffers={"*_[uv]": "first"}),
    "own buffers": Run(7, Memories, 10, (7,), buffers=MEMORIES),
    "own buffers, the first tower's": Run(8, Memories, 30, (7,), buffers={"*": "first"}),
    "adamw": Run(8, optimizer="adamw"),
    "bf16 autocast, sgd": Run(8, autocast=torch.bfloat16),
    "bf16 autocast, adamw": Run(7, autocast=torch.bfloat16, optimizer="adamw"),
    "fp16 autocast": Run(7, autocast=torch.float16),
    "fewer rows than towers": Run(7, rows=4, build=perceptron, shape=(7,)),
    "float64": mlp(7, build=partial(perceptron, torch.float64), dtype=torch.float64),
    "bf16 parameters": mlp(7, build=partial(perceptron, torch.bfloat16), dtype=torch.bfloat16),
    "bf16 parameters, fp32 gradients": mlp(7, build=wide_gradients, dtype=torch.bfloat16),
    "bf16 parameters summed in fp32": mlp(
        7, build=partial(perceptron, torch.bfloat16), dtype=torch.bfloat16, accumulate_dtype=torch.float32
    ),
}
SCENARIOS.update(RUNS)


class Branches(nn.Module):
    """Uses `rare` where a row says so and `never` never; has tied weights, two dtypes, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.first.weight
        self.rare = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.wide = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(torch.tanh(self.first(x))) * self.frozen
        hidden = (hidden * self.wide).float()
        if x[0, 0] > 0.8:
            hidden = hidden + self.rare(x)
        return self.last(hidden)


@scenario
def unused_tied_frozen_and_mixed_parameters(job: samestep.Job) -> str:
    model = Branches().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    used = []
    for batch in batches(5, 21, 7):
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        used.append([name for name, p in model.named_parameters() if p.grad is not None])
        optimizer.step()
    assert any("rare.weight" in names for names in used)
    assert not any("never.weight" in names for names in used)
    assert torch.equal(model.never.weight.cpu(), Branches().never.weight)
    return f"{samestep.digest(model)} {used}"


class Thawing(nn.Module):
    """Uses its second norm where a row says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.linear = nn.Linear(7, 5)
        self.norms = nn.ModuleList([nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norms[0](self.linear(x))
        return self.norms[1](hidden) if x[0, 0] > 0 else hidden


@scenario
def norms_frozen_on_and_off_and_used_by_some_towers(job: samestep.Job) -> str:
    found = []
    for mode in ("mean", "pooled", "first"):
        model = Thawing().to(job.device)
        towers = samestep.Towers(model, 7, job=job, statistics=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(batches(5, 30, 7)):
            model.norms[0].train(step % 2 == 0)
            model.norms[1].train(step != 2)
            for tower in towers(batch):
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            optimizer.step()
        found.append(samestep.digest(model))
    return " ".join(found)


class Watching(nn.Module):
    """Keeps what no weight depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        self.rows_seen += len(x)
        return self.net(x)


@scenario
def ignored_buffers(job: samestep.Job) -> str:
    model = Watching().to(job.device)
    policies = {"largest": "ignore", "rows_seen": "ignore"}
    towers = samestep.Towers(model, 7, job=job, buffers=policies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3, 10, 7):
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.step()
    mine = [towers.placement.rows(job.rank, rows) for rows in (10, 6, 10)]
    assert model.rows_seen == sum(len(rows) for each in mine for rows in each.values())
    return samestep.digest(dict(model.named_parameters()))


@scenario
def explicit_weights(job: samestep.Job) -> str:
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 5, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for batch in batches(3, 17, 7):
        for tower in towers(batch):
            keep = tower.batch["y"] != 0
            loss = F.cross_entropy(model(tower.batch["x"]), tower.batch["y"], reduction="none")
            tower.backward_sum((loss * keep).sum(), keep.sum() if tower.index % 2 else int(keep.sum()))
        weights.append(towers.average().count)
        optimizer.step()
    return f"{samestep.digest(model)} {weights}"


def keep(batch: dict[str, Tensor]) -> Tensor:
    return (batch["y"] != 0).sum()


def named_sums(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch["x"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    return {"kept": (losses * (batch["y"] != 0)).sum(), "rows": 0.01 * logits.square().sum()}


@scenario
def several_sums_with_counts_of_their_own(job: samestep.Job) -> str:
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=400, noise_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights = {"kept": keep, "rows": lambda batch: len(batch["y"])}
    step = samestep.Step(towers, named_sums, optimizer, counts=weights)
    reported = []
    for batch in [*batches(3, 17, 7), *batches(1, 4, 7)]:
        report = step(batch)
        reported.append(
            (report.loss, report.losses, report.count, report.tower_losses, report.tower_grad_norms)
        )
    return f"{samestep.digest(model)} {reported}"


def kept_sum(model: nn.Module, batch: dict[str, Tensor]) -> samestep.LossSum:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return samestep.LossSum((losses * (batch["y"] != 0)).sum(), keep(batch))


def two_sums(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    total = kept_sum(model, batch).total
    return {"kept": total, "some": total.square()}


@scenario
def counts_of_zero(job: samestep.Job) -> str:
    """In some towers, in all of one worker, in all; with buffers, unused parameters, sparse gradients."""
    results = []
    pictures, rows = batches(1, 14, 3, 8, 8)[0], batches(1, 14, 7)[0]
    for build, batch, policies, weights in [
        (convnet, pictures, {}, None),
        (convnet, pictures, {}, {"kept": keep, "some": keep}),
        (Branches, rows, {}, None),
        (Memories, rows, MEMORIES, {"kept": keep, "some": keep}),
        (Words, texts(1, 14)[0], {}, None),
    ]:
        model = build().to(job.device)
        towers = samestep.Towers(model, 7, job=job, on_zero_count="skip", bucket_bytes=300, buffers=policies)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = samestep.Step(towers, two_sums if weights else kept_sum, optimizer, counts=weights)
        for zeros in (range(0), range(8), range(8, 13), range(30), range(1, 14)):
            some = {"x": batch["x"], "y": batch["y"].clamp(min=1)}
            some["y"][zeros.start : zeros.stop] = 0
            before = samestep.digest(model)
            report = step(some)
            assert report.skipped == (samestep.digest(model) == before) == (len(zeros) == 30)
            results.append((report.loss, report.count, report.tower_losses, samestep.digest(model)))
    return str(results)


@scenario
def an_overflow_in_one_tower(job: samestep.Job) -> str:
    """The loss scale grows every second step, and shrinks where a tower overflows."""
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 7, job=job, noise_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = samestep.Step(towers, loss_of, optimizer, autocast=torch.float16)
    step.scaler.set_growth_interval(2)
    reported = []
    for number, batch in enumerate(batches(9, 30, 7)):
        if number in (2, 3, 7):
            batch["x"][4 * number % len(batch["x"])] *= 1e6
        report = step(batch)
        assert report.skipped == (number in (2, 3, 7))
        reported.append((step.scaler.state_dict(), report.tower_grad_norms, report.noise_scale))
    return f"{samestep.digest(model)} {reported}"


@scenario
def noise_scale(job: samestep.Job) -> str:
    results = []
    for num_towers, build, data in [
        (7, perceptron, [*batches(5, 30, 7), *batches(2, 3, 7)]),
        (5, convnet, [*batches(5, 30, 3, 8, 8), *batches(2, 10, 3, 8, 8)]),
        (7, Branches, batches(3, 21, 7)),
        (7, Words, texts(5, 30)),
    ]:
        model = build().to(job.device)
        towers = samestep.Towers(model, num_towers, job=job, bucket_bytes=1000, noise_every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in data:
            for tower in towers(batch):
                tower.backward(loss_of(model, tower.batch))
            report = towers.average()
            optimizer.step()
            results.append((report.tower_grad_norms, report.noise_scale))
        results.append((samestep.digest(model), towers.noise.state_dict()))
    return str(results)


class Root(nn.Module):
    """The loss is finite everywhere, and its gradient infinite where a row's root is that of 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.ones(7))
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.dropout(self.first(x), 0.5, train=True))
        return self.last(hidden + (self.scale * x.abs()).sqrt())


@scenario
def gradients_that_are_not_finite(job: samestep.Job) -> str:
    results = []
    for zeros in ([5], [5, 6, 13], range(17)):
        model = Root().to(job.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = samestep.Step(samestep.Towers(model, 7, job=job), loss_of, optimizer)
        batch, poisoned = batches(1, 17, 7)[0], batches(1, 17, 7)[0]
        poisoned["x"][list(zeros), 0] = 0
        step(batch)
        before = samestep.digest(model)
        results.append(message_of(partial(step, poisoned)))
        assert samestep.digest(model) == before
        step(batch)
        results.append(samestep.digest(model))
    return str(results)


@scenario
def streams_of_all_generators(job: samestep.Job) -> str:
    import random

    torch.manual_seed(job.rank)  # what comes before must not matter
    random.seed(job.rank)
    np.random.seed(job.rank)
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 6, job=job)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    for tower in towers(batches(1, 12, 7)[0]):
        noise = float(torch.rand(1)) + random.random() + float(np.random.rand())
        tower.backward(loss_of(model, tower.batch) * noise)
    towers.average()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    return samestep.digest({name: p.grad for name, p in model.named_parameters()})


@scenario
def loader(job: samestep.Job) -> str:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samestep.TowerLoader(Digits("train", augment=True), 250, towers, seed=4)
    rows = []
    for _ in range(2):
        for batch in data:
            for tower in towers(batch):
                pictures, labels = tower.batch
                tower.backward(F.cross_entropy(model(pictures), labels))
            rows.append(towers.average().rows)
            optimizer.step()
    assert rows == [250, 250, 250, 250, 250, 187] * 2
    return samestep.digest(model)


class Words(nn.Module):
    """Sparse embeddings: `words` for all, `bag`, `rare` where a row says so, `never`; and dense layers."""

    def __init__(self, num_words: int = 40) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(num_words, 6, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(num_words, 6, sparse=True, mode="mean")
        self.rare = nn.Embedding(num_words, 6, sparse=True)
        self.never = nn.Embedding(num_words, 6, sparse=True)
        self.last = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x[:, :4]).sum(1) + self.bag(x[:, 2:])
        if x[0, 0] > 30:
            hidden = hidden + self.rare(x[:, 1])
        return self.last(hidden)


def texts(num_steps: int, rows: int, num_words: int = 40) -> list[dict[str, Tensor]]:
    """Return batches of six words a row, few of them frequent; the second has fewer rows than seven."""
    generator = torch.Generator().manual_seed(2)
    sizes = [rows if step != 1 else 5 for step in range(num_steps)]
    return [
        {
            "x": (torch.rand(size, 6, generator=generator) ** 3 * num_words).long(),
            "y": torch.randint(0, 5, (size,), generator=generator),
        }
        for size in sizes
    ]


def layout(gradient: Tensor | None) -> str:
    """Say what kind of gradient it is, and how much it stores."""
    if gradient is None or not gradient.is_sparse:
        return "none" if gradient is None else "dense"
    assert gradient.is_coalesced()
    return f"{gradient._nnz()} rows"


@scenario
def sparse_embeddings(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    embeddings = [model.words.weight, model.bag.weight, model.rare.weight, model.never.weight]
    adam = torch.optim.SparseAdam(embeddings, lr=0.01)
    sgd = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for batch in texts(5, 30):
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        report = towers.average()
        seen.append([report.grad_norm, *(layout(parameter.grad) for parameter in embeddings)])
        adam.step()
        sgd.step()
    assert "none" in {step[3] for step in seen} != {"none"}
    assert {step[4] for step in seen} == {"none"}
    return f"{samestep.digest(model)} {seen}"


@scenario
def sparse_steps_clipped_and_summed_in_float64(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 5, job=job, accumulate_dtype=torch.float64)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> samestep.LossSum:
        keep = batch["y"] != 0
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return samestep.LossSum((losses * keep).sum(), keep.sum())

    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        step = samestep.Step(towers, loss, torch.optim.Adagrad(model.parameters(), lr=0.05), clip_norm=0.3)
        losses = [step(batch).loss for batch in texts(4, 24)]
    return f"{samestep.digest(model)} {losses}"


@scenario
def sparse_steps_in_float16(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 6, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = samestep.Step(towers, loss_of, optimizer, autocast=torch.float16, clip_norm=1.0)
    losses = [step(batch).loss for batch in texts(4, 24)]
    return f"{samestep.digest(model)} {losses}"


@scenario
def sparse_parameters_alone(job: samestep.Job) -> str:
    """No dense gradient at all, tokens that one tower alone has, and half-precision rows."""
    torch.manual_seed(10)
    model = nn.Embedding(1000, 5, sparse=True, dtype=torch.bfloat16).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for batch in texts(4, 30, 1000):
        for tower in towers(batch):
            tower.backward(F.cross_entropy(model(tower.batch["x"]).float().sum(1), tower.batch["y"]))
        towers.average()
        seen.append(layout(model.weight.grad))
        optimizer.step()
    return f"{samestep.digest(model)} {seen}"


@scenario
def sparse_and_dense_gradients_of_one_parameter(job: samestep.Job) -> str:
    """Tied to the output layer in some towers; there the gradient is dense, and so is the average."""
    torch.manual_seed(11)
    model = nn.Embedding(30, 8, sparse=True).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for number, batch in enumerate(texts(6, 21, 30)):
        for tower in towers(batch):
            hidden = model(tower.batch["x"]).mean(1)
            tied = tower.index in (number, number + 2) and number > 1
            tower.backward(((hidden @ model.weight.T if tied else hidden) ** 3).mean())
        seen.append((towers.average().grad_norm, layout(model.weight.grad)))
        optimizer.step()
    assert seen[0][1].endswith("rows")
    assert seen[2][1] == seen[5][1] == "dense"
    return f"{samestep.digest(model)} {seen}"


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most memory that torch held at a time for tensors made in `function`."""
    with torch.profiler.profile(
        profile_memory=True,
        activities=[torch.profiler.ProfilerActivity.CPU],
        acc_events=True,  # else 2.11 and 2.12 warn: https://github.com/pytorch/pytorch/pull/180387
    ) as profile:
        function()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


@scenario
def ten_million_rows(job: samestep.Job) -> str:
    """A dense gradient, or a flat buffer for one, would take 160 MB."""
    model = nn.Embedding(10_000_000, 4, sparse=True, _weight=torch.zeros(10_000_000, 4)).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(0, 10_000_000, 123_457)[:70].reshape(14, 5)

    def step() -> None:
        for tower in towers(words):
            tower.backward((model(tower.batch) - tower.batch[..., None]).square().mean())
        towers.average()
        optimizer.step()

    assert [peak_bytes(step) < 1e6 for _ in range(2)] == [True, True]
    assert layout(model.weight.grad) == "70 rows"
    return samestep.digest({"gradient": model.weight.grad.coalesce().values(), "rows": model.weight[words]})


class TwoEncoders(nn.Module):
    """Embeds two views of a row; the loss of the whole batch uses `log_scale`, `shift` is used in both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.left = nn.Sequential(
            nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 6)
        )
        self.right = nn.Linear(7, 6)
        self.shift = nn.Parameter(torch.full((6,), 0.1))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        noise = 0.1 * torch.randn(x.shape).to(x)
        return {"left": self.left(x) + self.shift, "right": self.right(x + noise), "y": batch["y"]}


def info_nce(model: TwoEncoders, outputs: dict[str, Tensor], batch: object) -> Tensor:
    left, right = (F.normalize(outputs[name].float()) for name in ("left", "right"))
    logits = model.log_scale.exp() * (left - model.shift) @ right.T
    logits = logits * (1 + 0.01 * torch.randn(1).to(logits))  # the loss has a stream of its own
    pairs = torch.arange(len(logits), device=logits.device)
    across = F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)
    return across + 0.1 * F.cross_entropy(outputs["left"].float(), outputs["y"])


@dataclass(frozen=True)
class WholeRun:
    """A small training run whose loss is one of the whole batch."""

    num_towers: int
    rows: int = 30
    autocast: torch.dtype | None = None
    statistics: str = "mean"

    def __call__(self, job: samestep.Job) -> str:
        model = TwoEncoders().to(job.device)
        towers = samestep.Towers(
            model, self.num_towers, job=job, seed=3, statistics=self.statistics, bucket_bytes=300
        )
        step = samestep.Step(
            towers,
            info_nce,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            forward=lambda model, batch: model(batch),
            autocast=self.autocast,
            clip_norm=1.0,
        )
        reports = [step(batch) for batch in batches(3, self.rows, 7)]
        assert model.never.grad is None
        # A step that float16 leaves out leaves no trace in the buffers either.
        assert int(model.left[1].num_batches_tracked) == sum(not report.skipped for report in reports)
        return f"{samestep.digest(model)} {[report.loss for report in reports]}"


WHOLE_RUNS = {
    **{f"whole batch, {towers} towers": WholeRun(towers) for towers in (4, 7, 8)},
    "whole batch, 13 towers": WholeRun(13, rows=60),
    "whole batch, pooled statistics": WholeRun(7, statistics="pooled"),
    "whole batch, bf16 autocast": WholeRun(7, autocast=torch.bfloat16),
    "whole batch, fp16 autocast": WholeRun(7, autocast=torch.float16),
}
SCENARIOS.update(WHOLE_RUNS)


@scenario
def whole_batch_with_fewer_rows_than_towers(job: samestep.Job) -> str:
    """Some workers have no outputs at all, and compute the loss like the others."""
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    seen = []

    def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
        logits, sizes = outputs
        seen.append((logits.shape, sizes.tolist(), samestep.digest(batch)))
        return (torch.cdist(logits, logits) + torch.eye(len(logits)).to(logits)).log().mean()

    for batch in batches(2, 3, 7):
        towers.whole_batch(batch, lambda part: (model(part["x"]), part["y"]), loss)
        towers.average()
    return f"{samestep.digest({name: p.grad for name, p in model.named_parameters()})} {seen}"


@scenario
def whole_batch_from_a_loader(job: samestep.Job) -> str:
    """Towers hand in other numbers of rows than they have, and large tensors beside small ones."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1000), nn.Linear(1000, 10)).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(part: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pictures, labels = part
        wide = model[1](model[0](pictures))
        even = labels % 2 == 0
        return {"wide": wide, "logits": model[2](wide)[even], "labels": labels[even], "even": even}

    def loss(outputs: dict[str, Tensor], batch: object) -> Tensor:
        spread = outputs["wide"].std() * outputs["even"].float().mean()
        return F.cross_entropy(outputs["logits"], outputs["labels"]) + spread.log()

    data = samestep.TowerLoader(Digits("train", augment=True), 700, towers, seed=4)
    losses = []
    for batch in data:
        towers.whole_batch(batch, forward, loss)
        losses.append(towers.average().loss)
        optimizer.step()
    return f"{samestep.digest(model)} {losses}"


@scenario
def segmentation(job: samestep.Job) -> str:
    """Losses weighted by pixels, batch norm, towers without rows, and pictures that are evaluated in turn."""
    found = []
    for towers, rows, statistics in ((7, 9, "mean"), (5, 4, "pooled")):
        settings = SegmentationSettings(
            towers=towers, batch_size=rows, statistics=statistics, steps=3, crop_size=16, width=2
        )
        experiment = settings.build(job)
        for batch, _ in zip(experiment.loader, range(3), strict=False):
            experiment.step(batch)
        found.append(samestep.digest(experiment.model))
    return str([*found, experiment.measure()])


@scenario
def from_a_checkpoint(job: samestep.Job) -> str:
    """Worker 0 alone writes and reads; all go on from it, in new objects."""

    def build() -> tuple[TrainingObjects, samestep.Step]:
        model = convnet().to(job.device)
        towers = samestep.Towers(model, 7, job=job, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        step = samestep.Step(towers, loss_of, optimizer, scheduler=schedule)
        state = {"optimizer": optimizer, "schedule": schedule}
        return TrainingObjects(model=model, towers=towers, state=state), step

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one"
        objects, step = build()
        data = batches(4, 30, 3, 8, 8)
        for index, batch in enumerate(data):
            if index == 2 and job.is_first:
                write(take_snapshot(objects), path)
            step(batch)
        others, step = build()
        restore(from_first_worker(job, lambda: read(path)).snapshot, others, path, job)
        job.barrier()
    assert others.towers.step == 2
    for batch in data[2:]:
        step(batch)
    assert samestep.digest(objects.model) == samestep.digest(others.model)
    return samestep.digest(others.model)


@scenario
def saved_by_all(job: samestep.Job) -> str:
    """A loop that draws its batches from global generators; all workers save, and load into new objects."""

    def build() -> dict[str, Any]:
        torch.manual_seed(8)
        model = convnet().to(job.device)
        towers = samestep.Towers(model, 7, job=job, seed=3, noise_every=1)
        loader = samestep.TowerLoader(list(range(40)), 16, towers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {
            **{"model": model, "towers": towers, "loader": loader},
            **{"averaged_model": averaged, "optimizer": optimizer},
        }

    def train(objects: dict[str, Any], num_steps: int) -> str:
        model, towers = objects["model"], objects["towers"]
        for _, batch in zip(range(num_steps), objects["loader"], strict=False):
            x = torch.randn(batch.rows, 3, 8, 8) + random.random() + np.random.rand()
            step_on(towers, {"x": x, "y": torch.randint(0, 5, (batch.rows,))})
            objects["optimizer"].step()
            objects["averaged_model"].update_parameters(model)
        found = [samestep.digest(model), samestep.digest(objects["averaged_model"]), towers.state_dict()]
        return str([*found, objects["loader"].state_dict()])

    seed_globals(5, job.device)
    objects = build()
    train(objects, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        assert samestep.save(path, **objects, rng=True) == path
        expected = train(objects, 2)
        others = build()
        assert samestep.load(path, **others, rng=True).step == 1
        job.barrier()
    assert train(others, 2) == expected
    return expected


@scenario
def a_model_that_changes(job: samestep.Job) -> str:
    """Other cuts at every step; layers frozen, thawed, added, cast to float64 and back."""
    model = convnet().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    told = []
    for step, batch in enumerate(batches(6, 16, 3, 8, 8)):
        inner = np.random.default_rng((step, job.world_size)).choice(6, job.world_size - 1, replace=False)
        towers.placement = Placement((0, *sorted(inner + 1), 7))
        model[0].requires_grad_(step != 1)
        if step == 3:
            torch.manual_seed(job.rank)  # all take over the first worker's new layer
            model.append(nn.Linear(5, 5).to(job.device))
        model.double() if step == 4 else model.float()
        for tower in towers({**batch, "x": batch["x"].to(next(model.parameters()).dtype)}):
            tower.backward(loss_of(model, tower.batch))
        told.append(towers.average().loss)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter -= 0.1 * parameter.grad
    return f"{told} {samestep.digest(model)}"


@scenario
def flags(job: samestep.Job) -> str:
    """The first and the last worker set different bits, and are asked once a step."""
    towers = samestep.Towers(perceptron().to(job.device), 7, job=job, bucket_bytes=300)
    asked: list[int] = []

    def answer() -> int:
        asked.append(towers.step)
        mine = (job.rank == 0) | 2 * (job.rank == job.world_size - 1)
        return mine if towers.step != 1 else 0

    heard = []
    for batch in batches(3, 4, 7):  # fewer rows than towers
        for tower in towers(batch, flags=answer):
            tower.backward(loss_of(towers.model, tower.batch))
        heard.append(towers.average().flags)
    return f"{heard} {asked}"


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def step_on(towers: samestep.Towers, batch: object) -> None:
    for tower in towers(batch):
        tower.backward(loss_of(towers.model, tower.batch))
    towers.average()


FAULTS: dict[str, Scenario] = {}


def fault(function: Scenario) -> Scenario:
    """Note a scenario that ends in an error; `job.rank == 1` is the worker that differs."""
    FAULTS[function.__name__] = function
    return function


@fault
def different_num_towers(job: samestep.Job) -> str:
    return message_of(
        lambda: samestep.Towers(perceptron().to(job.device), 8 if job.rank != 1 else 7, job=job)
    )


@fault
def too_few_towers_on_one(job: samestep.Job) -> str:
    return message_of(
        lambda: samestep.Towers(perceptron().to(job.device), 8 if job.rank != 1 else 1, job=job)
    )


@fault
def different_model(job: samestep.Job) -> str:
    model = perceptron() if job.rank != 1 else nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 5))
    return message_of(lambda: samestep.Towers(model.to(job.device), 8, job=job))


@fault
def different_policies_for_buffers(job: samestep.Job) -> str:
    policies = MEMORIES if job.rank != 1 else {**MEMORIES, "codes": "first"}
    return message_of(lambda: samestep.Towers(Memories().to(job.device), 8, job=job, buffers=policies))


@fault
def buffers_without_a_policy(job: samestep.Job) -> str:
    towers = samestep.Towers(Memories().to(job.device), 8, job=job)
    return message_of(lambda: step_on(towers, batches(1, 16, 7)[0]))


@fault
def different_rows(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    return message_of(lambda: step_on(towers, batches(1, 16 if job.rank != 1 else 18, 7)[0]))


@fault
def different_values(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    batch = batches(1, 16, 7)[0]
    batch["x"] += job.rank == 1
    return message_of(lambda: step_on(towers, batch))


@fault
def bad_batch_on_one(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    batch = batches(1, 16, 7)[0]
    if job.rank == 1:
        batch["y"] = batch["y"][:5]
    return message_of(lambda: step_on(towers, batch))


@fault
def bad_pictures_on_one(job: samestep.Job) -> str:
    """With batch norm, whose statistics travel too, and more than one bucket."""
    towers = samestep.Towers(convnet().to(job.device), 7, job=job, bucket_bytes=1000)
    batch = batches(1, 14, 3, 8, 8)[0]
    if job.rank == 1:
        batch["y"] = batch["y"][:5]
    return message_of(lambda: step_on(towers, batch))


@fault
def bad_batch_on_one_with_counts(job: samestep.Job) -> str:
    """What is wrong is reported with the counts, before the first pass."""
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    batch = batches(1, 16, 7)[0]
    if job.rank == 1:
        batch["y"] = batch["y"][:5]
    return message_of(lambda: towers(batch, counts={"kept": keep}))


@fault
def bad_count_on_one(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    return message_of(
        lambda: towers(batches(1, 16, 7)[0], counts={"kept": lambda batch: -1 if job.rank == 1 else 1})
    )


@fault
def bad_batch_on_all(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    return message_of(lambda: step_on(towers, {"x": torch.zeros(3, 7), "y": torch.zeros(2)}))


class Table(nn.Module):
    """Looks up rows of a parameter that nothing says to be sparse, where it is in several buckets' way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(40, 7))
        self.linear = nn.Linear(7, 5)
        self.is_sparse = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.embedding(x[:, 0], self.table, sparse=self.is_sparse))


@fault
def sparse_gradient_on_worker_1(job: samestep.Job) -> str:
    model = Table().to(job.device)
    model.is_sparse = job.rank == 1
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=100)
    return message_of(lambda: step_on(towers, texts(1, 16)[0]))


@fault
def different_sparse_parameters(job: samestep.Job) -> str:
    model = Table().to(job.device)
    listed = [model.table] if job.rank != 1 else [model.table, model.linear.weight]
    return message_of(lambda: samestep.Towers(model, 7, job=job, sparse_parameters=listed))


@fault
def sparse_parameter_of_another_model_on_one(job: samestep.Job) -> str:
    model = Table().to(job.device)
    listed = [(model if job.rank != 1 else Table()).table]
    return message_of(lambda: samestep.Towers(model, 7, job=job, sparse_parameters=listed))


@fault
def bad_texts_on_one(job: samestep.Job) -> str:
    towers = samestep.Towers(Words().to(job.device), 8, job=job)
    batch = texts(1, 16)[0]
    if job.rank == 1:
        batch["y"] = batch["y"][:5]
    return message_of(lambda: step_on(towers, batch))


@fault
def a_wrong_label_map(job: samestep.Job) -> str:
    """Each map is read by one worker alone, here the one of rank 1."""
    with TemporaryDirectory() as folder:
        for index, name in enumerate("abc"):
            for kind, shape in {"pictures": (4, 5, 3), "labels": (4, 5)}.items():
                path = Path(folder) / kind / f"{name}.png"
                path.parent.mkdir(exist_ok=True)
                Image.fromarray(np.full(shape, 7 * (index == 1), dtype=np.uint8)).save(path)
        return message_of(lambda: LabelMaps(Path(folder), 4).check(job))


@fault
def a_step_ahead(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    towers._step += job.rank == 1
    return message_of(lambda: step_on(towers, batches(1, 16, 7)[0]))


def whole_step(
    job: samestep.Job, forward: Callable[[int, Tensor], Tensor], loss: Callable[..., Tensor]
) -> str:
    """Take a step with a loss of the whole batch; `forward` also gets how often it was called before."""
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 6, job=job, bucket_bytes=300)
    calls = itertools.count()

    def step() -> None:
        towers.whole_batch(batches(1, 16, 7)[0], lambda part: forward(next(calls), model(part["x"])), loss)
        towers.average()

    return message_of(step)


def spread(outputs: Tensor, batch: object) -> Tensor:
    return outputs.std()


def failing(job: samestep.Job, when: bool, value: Tensor) -> Tensor:
    if job.rank == 1 and when:
        raise MemoryError("out of memory")
    return value


@fault
def first_pass_fails_on_one(job: samestep.Job) -> str:
    return whole_step(job, lambda calls, out: failing(job, calls == 1, out), spread)


@fault
def loss_fails_on_one(job: samestep.Job) -> str:
    return whole_step(job, lambda calls, out: out, lambda out, batch: failing(job, True, out.std()))


@fault
def second_pass_fails_on_one(job: samestep.Job) -> str:
    return whole_step(job, lambda calls, out: failing(job, calls == 3, out), spread)


@fault
def loss_fails_on_all(job: samestep.Job) -> str:
    return whole_step(job, lambda calls, out: out, lambda out, batch: out.std() * (1 // 0))


@fault
def outputs_that_differ(job: samestep.Job) -> str:
    return whole_step(job, lambda calls, out: out.double() if job.rank == 1 else out, spread)


@fault
def whole_batch_a_step_ahead(job: samestep.Job) -> str:
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 6, job=job)
    towers._step += job.rank == 1
    return message_of(lambda: towers.whole_batch(batches(1, 16, 7)[0]["x"], model, spread))


@fault
def no_checkpoint_on_worker_0(job: samestep.Job) -> str:
    """The others could not tell: they do not look."""
    return message_of(lambda: from_first_worker(job, lambda: read(Path("nowhere"))))


def save(job: samestep.Job, path: Path, **more: Any) -> object:
    model = perceptron().to(job.device)
    return samestep.save(path, model=model, towers=samestep.Towers(model, 8, job=job), **more)


@fault
def saved_without_towers(job: samestep.Job) -> str:
    """Which workers write cannot be known."""
    return message_of(lambda: samestep.save("path", model=perceptron()))


@fault
def saved_to_a_disk_without_room(job: samestep.Job) -> str:
    """Only worker 0 writes, so only worker 0 sees it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        if job.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        message = message_of(lambda: save(job, path))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not any(Path(folder).iterdir())
    return message


@fault
def saved_with_state_that_cannot_be_written(job: samestep.Job) -> str:
    """Found before anything is written."""
    return message_of(lambda: save(job, Path("path"), thing=object()))


@fault
def generators_that_differ_on_one(job: samestep.Job) -> str:
    """One worker has drawn a number more."""
    seed_globals(6, job.device)
    if job.rank == 1:
        random.random()
    return message_of(lambda: save(job, Path("path"), rng=True)).replace("worker 1", "worker 1 failed, and")


@fault
def state_that_cannot_be_loaded_on_one(job: samestep.Job) -> str:
    """All others have loaded it by then, and undo that."""

    class Picky(nn.Linear):
        fails = job.rank == 1

        def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> object:
            if self.fails:
                self.fails = False
                raise ArithmeticError("not today")
            return super().load_state_dict(state)

    model, thing = perceptron().to(job.device), Picky(1, 1)
    towers = samestep.Towers(model, 8, job=job)
    with tempfile.TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        samestep.save(path, model=model, towers=towers, thing=thing)
        step_on(towers, batches(1, 16, 7)[0])
        with torch.no_grad():
            thing.weight.add_(1)
        before = (samestep.digest(thing), towers.state_dict())
        message = message_of(lambda: samestep.load(path, model=model, towers=towers, thing=thing))
        job.barrier()
    assert (samestep.digest(thing), towers.state_dict()) == before
    return message


@fault
def a_model_that_does_not_fit_on_one(job: samestep.Job) -> str:
    """Nothing is changed on any worker."""
    model = perceptron()
    saved = perceptron() if job.rank != 1 else nn.Linear(1, 1)
    snapshot = take_snapshot(TrainingObjects(model=saved), 2)
    return message_of(lambda: restore(snapshot, TrainingObjects(model=model), Path("path"), job))


def main(out: Path, kind: str = "scenarios", device: str = "cpu") -> None:
    job = samestep.init(device, timeout_s=60)
    runs = {"scenarios": SCENARIOS, "faults": FAULTS}[kind]
    results = {name: run(job) for name, run in runs.items()}
    out.with_suffix(f".{job.rank}").write_text(json.dumps(results))
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
