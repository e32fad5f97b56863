"""What users of other libraries ask for, one function each; docs/promises.md lists them.

Each compares with the truth, mostly the gradient of the unsplit batch in float64, and returns what all
placements must have alike.

python promises.py OUT    run all of them as a worker of torchrun; worker N writes OUT.N
"""

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.app.evaluation import Evaluation

T = 5
PROMISES: dict[str, Callable[[samestep.Job], Any]] = {}


def promise(function: Callable[[samestep.Job], Any]) -> Callable[[samestep.Job], Any]:
    PROMISES[function.__name__] = function
    return function


def net(*extra: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), *extra, nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def rows(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (count,), generator=generator)


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def take(towers: samestep.Towers, batch: Any, loss: Callable[[nn.Module, Any], Tensor] = mean_loss) -> Any:
    for tower in towers(batch):
        tower.backward(loss(towers.model, tower.batch))
    return towers.average()


def truth(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of a copy of the model, its batch in one piece."""
    whole = copy.deepcopy(model)
    whole.zero_grad()
    loss(whole).backward()
    return gradients(whole)


def assert_close(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)


@promise
def a_loss_over_tokens_is_their_mean_not_a_mean_of_means(job: samestep.Job) -> str:
    model = net()
    x, y = rows(17)
    y[torch.arange(17) % 3 == 0] = -100
    y[:4] = -100  # the whole of tower 0
    towers = samestep.Towers(model, T, job=job)
    for tower in towers((x, y)):
        inputs, labels = tower.batch
        total = F.cross_entropy(model(inputs), labels, reduction="sum")
        tower.backward_sum(total, (labels != -100).sum())
    assert towers.average().count == float((y != -100).sum())
    assert_close(gradients(model), truth(model, lambda m: F.cross_entropy(m(x), y)))
    return samestep.digest(gradients(model))


@promise
def nothing_divides_behind_the_users_back(job: samestep.Job) -> list[str]:
    batch, digests = rows(12), []
    for num_towers in (3, 4, 6):
        model = net()
        towers = samestep.Towers(model, num_towers, job=job)
        for tower in towers(batch):
            inputs, labels = tower.batch
            total = F.cross_entropy(model(inputs), labels, reduction="sum")
            tower.backward_sum(total, float(tower.index == 0))  # weights add up to 1: the sum itself
        towers.average()
        assert_close(
            gradients(model), truth(model, lambda m: F.cross_entropy(m(batch[0]), batch[1], reduction="sum"))
        )
        digests.append(samestep.digest(gradients(model)))
    return digests


@promise
def one_device_equals_many(job: samestep.Job) -> str:
    model = net(nn.BatchNorm1d(9), nn.Dropout(0.3), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    towers = samestep.Towers(model, 7, job=job)
    for count in (30, 30, 16):
        take(towers, rows(count, torch.float32))
        optimizer.step()
    return samestep.digest(model)


@promise
def every_tower_and_every_example_has_random_numbers_of_its_own(job: samestep.Job) -> list[Any]:
    towers = samestep.Towers(net(), 4, job=job)
    drawn = torch.zeros(2, 4, dtype=torch.float64)
    for step in range(2):
        for tower in towers(rows(8)):
            drawn[step, tower.index] = torch.rand(())
            tower.backward(mean_loss(towers.model, tower.batch))
        towers.average()

    class Noise(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, example: int) -> Tensor:
            return torch.rand(1, dtype=torch.float64)

    loader = samestep.TowerLoader(Noise(), 12, towers, shuffle=False)
    noise = torch.zeros(2, 12, dtype=torch.float64)
    for epoch in range(2):
        for batch in loader:
            for tower, own in towers.placement.rows(job.rank, 12).items():
                noise[epoch, own.start : own.stop] = batch.slices[tower][:, 0]
    if job.world_size > 1:
        torch.distributed.all_reduce(drawn)
        torch.distributed.all_reduce(noise)
    assert len(drawn.unique()) == drawn.numel()
    assert len(noise.unique()) == noise.numel()
    return [drawn.tolist(), noise.tolist()]


@promise
def a_short_last_batch_is_a_step_like_any_other(job: samestep.Job) -> list[Any]:
    model, seen = net(), []
    x, y = rows(11)
    towers = samestep.Towers(model, T, job=job)
    for batch in samestep.TowerLoader(list(zip(x, y, strict=True)), 4, towers, shuffle=False):
        report = take(towers, batch)
        at = 4 * batch.position
        part = (x[at : at + 4], y[at : at + 4])
        assert_close(gradients(model), truth(model, lambda m, part=part: mean_loss(m, part)))
        seen.append((report.rows, samestep.digest(gradients(model))))
    assert [count for count, _ in seen] == [4, 4, 3]
    return seen


@promise
def batch_norm_statistics_are_those_of_all_towers(job: samestep.Job) -> str:
    model = net(nn.BatchNorm1d(9))
    x, y = rows(17)
    whole = copy.deepcopy(model)
    whole(x)
    towers = samestep.Towers(model, T, job=job, statistics="pooled")
    take(towers, (x, y))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-12, atol=1e-12)
    return samestep.digest(model)


@promise
def uneven_inputs_hang_nobody(job: samestep.Job) -> list[Any]:
    model, found = net(), []
    towers = samestep.Towers(model, T, job=job)
    for count in (1, 2, 13):  # some workers have no rows at all
        batch = rows(count)
        take(towers, batch)
        assert_close(gradients(model), truth(model, lambda m, batch=batch: mean_loss(m, batch)))
        found.append(samestep.digest(gradients(model)))
    try:
        x, y = rows(8)
        take(towers, (x, y[:3] if job.rank == job.world_size - 1 else y))  # one worker has a bad batch
    except samestep.Error as error:
        stopped = type(error).__name__
    assert stopped in ("BatchError", "DisagreementError")
    return found


@promise
def evaluation_counts_each_example_once(job: samestep.Job) -> list[Any]:
    class Examples:
        def __len__(self) -> int:
            return 1003

        def batch(self, examples: Any, seeds: Any) -> Tensor:
            return torch.as_tensor(examples)

    def measure(model: nn.Module, examples: Tensor) -> dict[str, Any]:
        sums = torch.stack([examples.sum(), examples.square().sum()])
        return {"sums": (sums, len(examples)), "roots": (examples.float().sqrt().sum(), 1)}

    totals = Evaluation(Examples(), measure, rows=50).totals(nn.Identity(), job)
    sums, count = totals["sums"]
    numbers = np.arange(1003)
    assert [int(count), *sums.tolist()] == [1003, numbers.sum(), (numbers**2).sum()]
    return [*sums.tolist(), totals["roots"][0].item().hex()]


@promise
def going_on_in_mid_epoch_repeats_and_omits_nothing(job: samestep.Job) -> list[list[int]]:
    towers = samestep.Towers(net(), T, job=job)

    def loader() -> samestep.TowerLoader:
        return samestep.TowerLoader(list(range(23)), 4, towers, seed=1)

    def seen(batch: Any) -> list[int]:
        there = torch.zeros(23, dtype=torch.int64)
        for values in batch.slices.values():
            there[values] += 1
        if job.world_size > 1:
            torch.distributed.all_reduce(there)
        return there.nonzero().flatten().tolist()

    whole, first, second = loader(), loader(), loader()
    expected = [seen(batch) for _ in range(2) for batch in whole]
    stopped_at = 8  # in the second epoch
    found = []
    while len(found) < stopped_at:
        for batch in first:
            found.append(seen(batch))
            if len(found) == stopped_at:
                break
    second.position = stopped_at
    found += [seen(batch) for batch in second]
    assert found == expected
    assert sorted(example for batch in expected[:6] for example in batch) == list(range(23))
    return found


@promise
def clipping_acts_once_on_the_average(job: samestep.Job) -> str:
    model, batch = net(), rows(17)
    expected = copy.deepcopy(model)
    mean_loss(expected, batch).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
    towers = samestep.Towers(model, T, job=job)
    samestep.Step(towers, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=0.05)(batch)
    assert_close(gradients(model), gradients(expected))
    return samestep.digest(model)


@promise
def a_sharded_optimizer_changes_no_result(job: samestep.Job) -> str:
    digests = []
    torch.manual_seed(0)
    first = net(nn.Linear(9, 90), nn.Linear(90, 9))
    for is_sharded in (False, True):
        model = copy.deepcopy(first)
        towers = samestep.Towers(model, T, job=job)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if is_sharded:
            optimizer = samestep.ShardedOptimizer(towers, torch.optim.AdamW, lr=0.1)
        step = samestep.Step(towers, mean_loss, optimizer, clip_norm=0.05)
        for count in (17, 11, 4):
            step(rows(count))
        digests.append(samestep.digest(model))
    assert digests[0] == digests[1]
    return digests[1]


@promise
def schedule_and_average_move_once_a_step(job: samestep.Job) -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    towers = samestep.Towers(model, T, job=job)
    step = samestep.Step(towers, mean_loss, optimizer, scheduler=schedule, averaged_model=average)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        step(rows(17))
    assert rates == [1.0, 0.5, 0.25]
    assert int(average.n_averaged) == 3
    return rates


@promise
def there_is_no_context_to_forget(job: samestep.Job) -> str:
    """The first backward is as good as the last, and nothing is left over for the next step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    towers = samestep.Towers(model, T, job=job)
    for count in (17, 9, 17):
        batch = rows(count)
        expected = truth(model, lambda m, batch=batch: mean_loss(m, batch))
        take(towers, batch)
        assert_close(gradients(model), expected)
        optimizer.step()
    return samestep.digest(model)


@promise
def unused_parameters_keep_no_gradient(job: samestep.Job) -> list[str]:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes, self.never = net(), net(), net()

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + (self.sometimes(x) if x[0, 0] > 0 else 0)

    model, batch = Branches(), rows(17)
    towers = samestep.Towers(model, T, job=job)
    take(towers, batch)
    slices = zip(batch[0].tensor_split(T), batch[1].tensor_split(T), strict=True)

    def by_hand(m: nn.Module) -> Tensor:
        return torch.stack([mean_loss(m, part) * len(part[0]) for part in slices]).sum() / 17

    assert_close(gradients(model), truth(model, by_hand))
    used = [name for name, gradient in gradients(model).items() if gradient is not None]
    assert {name.split(".")[0] for name in used} == {"always", "sometimes"}
    return used


@promise
def a_contrastive_loss_sees_the_negatives_of_the_whole_batch(job: samestep.Job) -> str:
    model = net()
    x, _ = rows(17)

    def contrast(outputs: Tensor, _: Any = None) -> Tensor:
        sides = F.normalize(outputs, dim=1)
        return F.cross_entropy(sides @ sides.roll(1, 1).T / 0.1, torch.arange(len(outputs)))

    towers = samestep.Towers(model, T, job=job)
    towers.whole_batch(x, model, contrast)
    towers.average()
    assert_close(gradients(model), truth(model, lambda m: contrast(m(x))))
    return samestep.digest(gradients(model))


@promise
def the_reported_loss_is_that_of_all_rows(job: samestep.Job) -> list[float]:
    model = net()
    x, y = rows(17)
    report = take(samestep.Towers(model, T, job=job), (x, y))
    assert math.isclose(report.loss, mean_loss(model, (x, y)).item(), rel_tol=1e-12)
    for loss, part in zip(
        report.tower_losses, zip(x.tensor_split(T), y.tensor_split(T), strict=True), strict=True
    ):
        assert math.isclose(loss, mean_loss(model, part).item(), rel_tol=1e-12)
    return [report.loss, *report.tower_losses]


@promise
def all_agree_on_a_float16_overflow(job: samestep.Job) -> list[Any]:
    model = net(dtype=torch.float32)
    x, y = rows(17, torch.float32)
    towers = samestep.Towers(model, T, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = samestep.Step(towers, mean_loss, optimizer, autocast=torch.float16)
    story = []
    for overflows in (False, True, False):
        big = x.clone()
        big[-1] *= 1e6 if overflows else 1  # in the last tower alone
        report = step((big, y))
        assert step.scaler is not None
        story.append((report.skipped, step.scaler.get_scale(), samestep.digest(model)))
    assert [skipped for skipped, _, _ in story] == [False, True, False]
    assert story[1][1] == story[0][1] / 2
    assert story[1][2] == story[0][2]
    return story


@promise
def any_number_of_workers_up_to_that_of_towers(job: samestep.Job) -> dict[int, str]:
    found = {}
    for num_towers in (job.world_size, 4, 7, 13):
        model = net(nn.Dropout(0.3), dtype=torch.float32)
        take(samestep.Towers(model, num_towers, job=job), rows(29, torch.float32))
        found[num_towers] = samestep.digest(gradients(model))
    return {num_towers: found[num_towers] for num_towers in (4, 7, 13)}


def main(out: Path) -> None:
    job = samestep.init("cpu", timeout_s=60)
    found = {name: function(job) for name, function in PROMISES.items()}
    out.with_suffix(f".{job.rank}").write_text(json.dumps(found))
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
