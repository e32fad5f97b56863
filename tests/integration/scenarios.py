"""Small training runs, each ending in a digest: run in one process and in several, and compared.

python scenarios.py OUT [DEVICE]    run all of them as a worker of torchrun; worker N writes OUT.N
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.datasets.digits import Digits

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
            average=average,
        )
        losses = [step(batch).loss for batch in batches(4, self.rows, *self.shape, dtype=self.dtype)]
        return f"{samestep.digest(model)} {samestep.digest(average)} {losses}"


def wide_gradients() -> nn.Module:
    """Return bfloat16 parameters whose gradients are float32."""
    model = perceptron(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


mlp = partial(Run, build=perceptron, shape=(7,), rows=48)
RUNS = {
    **{f"convnet, {towers} towers": Run(towers) for towers in (4, 5, 7, 8, 13, 16)},
    **{f"perceptron, {towers} towers": mlp(towers, optimizer="adamw") for towers in (4, 7, 8, 13)},
    "one bucket": Run(7, bucket_bytes=2**25),
    "pooled statistics": Run(7, statistics="pooled"),
    "first tower's statistics": Run(7, statistics="first"),
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
            tower.backward((loss * keep).sum(), weight=keep.sum() if tower.index % 2 else int(keep.sum()))
        weights.append(towers.average().weight)
        optimizer.step()
    return f"{samestep.digest(model)} {weights}"


def keep(batch: dict[str, Tensor]) -> Tensor:
    return (batch["y"] != 0).sum()


def named_sums(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch["x"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    return {"kept": (losses * (batch["y"] != 0)).sum(), "rows": 0.01 * logits.square().sum()}


@scenario
def several_sums_with_weights_of_their_own(job: samestep.Job) -> str:
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=400, noise_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights = {"kept": keep, "rows": lambda batch: len(batch["y"])}
    step = samestep.Step(towers, named_sums, optimizer, weights=weights)
    told = []
    for batch in [*batches(3, 17, 7), *batches(1, 4, 7)]:
        report = step(batch)
        told.append((report.loss, report.losses, report.weight, report.tower_losses, report.tower_grad_norms))
    return f"{samestep.digest(model)} {told}"


@scenario
def weights_of_zero(job: samestep.Job) -> str:
    """In some towers, in all of one worker, in all; in one sum and in each of several."""
    results = []
    for weights in (None, {"kept": keep, "some": keep}):
        model = convnet().to(job.device)
        towers = samestep.Towers(model, 7, job=job, on_zero_weight="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def loss_fn(
            model: nn.Module, batch: dict[str, Tensor], *, named: bool = weights is not None
        ) -> object:
            logits = model(batch["x"])
            losses = F.cross_entropy(logits, batch["y"], reduction="none")
            total = (losses * (batch["y"] != 0)).sum()
            return {"kept": total, "some": total.square()} if named else (total, keep(batch))

        step = samestep.Step(towers, loss_fn, optimizer, weights=weights)
        for zeros in (range(0), range(8), range(8, 13), range(30), range(1, 14)):
            batch = batches(1, 14, 3, 8, 8)[0]
            batch["y"][zeros.start : zeros.stop] = 0
            report = step(batch)
            assert report.skipped == (len(zeros) == 30)
            results.append((report.loss, report.weight, report.tower_losses, samestep.digest(model)))
    return str(results)


@scenario
def an_overflow_in_one_tower(job: samestep.Job) -> str:
    """The loss scale grows every second step, and shrinks where a tower overflows."""
    model = perceptron().to(job.device)
    towers = samestep.Towers(model, 7, job=job, noise_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = samestep.Step(towers, loss_of, optimizer, autocast=torch.float16)
    step.scaler.set_growth_interval(2)
    told = []
    for number, batch in enumerate(batches(9, 30, 7)):
        if number in (2, 3, 7):
            batch["x"][4 * number % len(batch["x"])] *= 1e6
        report = step(batch)
        assert report.skipped == (number in (2, 3, 7))
        told.append((step.scaler.state_dict(), report.tower_grad_norms, report.noise_scale))
    return f"{samestep.digest(model)} {told}"


@scenario
def noise_scale(job: samestep.Job) -> str:
    results = []
    for num_towers, build, shape in ((7, perceptron, (7,)), (5, convnet, (3, 8, 8))):
        model = build().to(job.device)
        towers = samestep.Towers(model, num_towers, job=job, bucket_bytes=1000, noise_every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in [*batches(5, 30, *shape), *batches(2, 3, *shape)]:
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

    import numpy as np

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


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except samestep.Error as error:
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
def bad_batch_on_one_with_weights(job: samestep.Job) -> str:
    """What is wrong is told with the counts, before the first pass."""
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    batch = batches(1, 16, 7)[0]
    if job.rank == 1:
        batch["y"] = batch["y"][:5]
    return message_of(lambda: towers(batch, weights={"kept": keep}))


@fault
def bad_count_on_one(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    return message_of(
        lambda: towers(batches(1, 16, 7)[0], weights={"kept": lambda batch: -1 if job.rank == 1 else 1})
    )


@fault
def bad_batch_on_all(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    return message_of(lambda: step_on(towers, {"x": torch.zeros(3, 7), "y": torch.zeros(2)}))


@fault
def a_step_ahead(job: samestep.Job) -> str:
    towers = samestep.Towers(perceptron().to(job.device), 8, job=job)
    towers.step += job.rank == 1
    return message_of(lambda: step_on(towers, batches(1, 16, 7)[0]))


def main(out: Path, device: str = "cpu") -> None:
    job = samestep.init(device, timeout_s=60)
    results = {name: run(job) for name, run in SCENARIOS.items()}
    messages = {name: run(job) for name, run in FAULTS.items()}
    out.with_suffix(f".{job.rank}").write_text(json.dumps({"results": results, "messages": messages}))
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
