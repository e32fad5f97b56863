"""Losses that are sums with counts, that overflow or are not finite, and the noise of their gradients."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep

from ...nets import loss_of, take_step
from .batches import batches, texts
from .models import MEMORIES, Branches, Memories, Words, convnet, perceptron
from .scenario import message_of, scenario


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
    return {"kept": total, "some": 2 * total}


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
            report = take_step(towers, batch)
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
