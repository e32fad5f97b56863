"""Losses of the whole batch."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.recipes.digits.data import Digits

from .batches import batches
from .models import perceptron
from .scenario import SCENARIOS, fault, message_of, scenario


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
