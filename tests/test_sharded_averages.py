"""Steps in which each worker gets the averages of its shard only: the bits of the plain optimizer."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

import samestep
from samestep import LostWorkerError, ShardedOptimizer, Step, Towers
from samestep.sharding import cuts
from samestep.summation import buckets, norms
from samestep.towers import division

from .cases import mostly_long
from .simulation import Faults, Killed, simulate, values
from .test_sharded_optimizer import (
    ALONE,
    OPTIMIZERS,
    Net,
    batch_of,
    groups_of,
    loss_of,
    make,
    same,
)
from .test_trainer import examples


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let small nets do what large ones do."""
    for module in (norms, division, cuts):
        monkeypatch.setattr(module, "NORM_BLOCK", 128)
    monkeypatch.setattr(buckets, "_SMALL_BYTES", 0)


def step_of(job, kind, settings, *, sharded, params=groups_of, dtype=torch.float32, **more):
    model = Net(dtype)
    towers = Towers(model, 7, job=job, noise_every=2, bucket_bytes=3000)
    optimizer = make(towers, kind, sharded=sharded, params=params(model), **settings)
    return Step(towers, loss_of, optimizer, **{"clip_norm": 0.5, "on_nonfinite": "skip", **more})


def train(step, dtype=torch.float32, **options):
    """Take steps: in the third the gradient is not finite, then a layer is thawed, another one frozen."""
    reports, model = [], step.towers.model
    for number in range(6):
        batch = batch_of(number, 11 if number < 4 else 5, dtype)
        if number == 2:
            batch["x"][4] = math.nan
        if number == 3:
            model.frozen.requires_grad_(True)
            model.first.requires_grad_(False)
        reports.append(step(batch, **options))
    assert [report.skipped for report in reports] == [False, False, True, False, False, False]
    return reports


def work(job, kind, settings, **options):
    step = step_of(job, kind, settings, **options)
    reports = train(step, options.get("dtype", torch.float32))
    if isinstance(step.optimizer, ShardedOptimizer):
        assert all(parameter.grad is None for parameter in step.towers.model.parameters())
        assert step.towers._opening.plan.is_sharded == (job.world_size > 1)
    numbers = [(r.grad_norm, r.noise_scale, r.tower_grad_norms) for r in reports]
    return samestep.digest(step.towers.model), step.optimizer.state_dict(), repr(numbers)


def check(kind, settings, all_num_workers=(1, 2, 3, 4), **options):
    expected = work(ALONE, kind, settings, sharded=False, **options)
    for num_workers in all_num_workers:
        for found in values(lambda job: work(job, kind, settings, sharded=True, **options), num_workers):
            assert found[0] == expected[0]
            assert same(found[1], expected[1])
            assert found[2] == expected[2]


@pytest.mark.parametrize(
    ("kind", "settings"), mostly_long(OPTIMIZERS, 1), ids=lambda each: getattr(each, "__name__", "")
)
def test_weights_state_and_norms_are_those_of_the_plain_optimizer(kind, settings):
    check(kind, settings, (2, 3))


@pytest.mark.long
def test_on_each_number_of_workers():
    check(AdamW, {"lr": 0.01})


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_each_precision(dtype):
    check(AdamW, {"lr": 0.01}, (3,), dtype=dtype)


@pytest.mark.long
def test_a_net_of_which_little_was_trained_when_it_was_shared_out(monkeypatch):
    monkeypatch.setattr(buckets, "_SMALL_BYTES", 40_000)

    def train(job, *, sharded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 30), nn.ReLU(), nn.Linear(30, 3))
        body = model[:4].requires_grad_(False)
        towers = Towers(model, 7, job=job)
        optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.01)
        step = Step(towers, lambda model, x: model(x).square().mean(), optimizer, clip_norm=0.5)
        is_sharded = []
        for number in range(4):
            body.requires_grad_(number >= 2)
            step(torch.randn(9, 20))
            is_sharded.append(towers._opening.plan.is_sharded)
        return samestep.digest(model), is_sharded

    expected, _ = train(ALONE, sharded=False)
    for num_workers in (2, 3):
        found = values(lambda job: train(job, sharded=True), num_workers)
        assert found == [(expected, [False, False, True, True])] * num_workers


class Plain(SGD):
    """Of a class that nobody knows to be elementwise, so whole parameters are sharded."""


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 2, 4])
def test_an_optimizer_of_whole_parameters(num_workers):
    check(Plain, {"lr": 0.01, "momentum": 0.9}, (num_workers,))


@pytest.mark.long
def test_with_sums_that_have_names():
    def loss(model, batch):
        total = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"even": total[batch["y"] % 2 == 0].sum(), "all": total.sum()}

    counts = {"even": lambda part: (part["y"] % 2 == 0).sum(), "all": lambda part: len(part["y"])}

    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded, counts=counts)
        step.loss_fn = loss
        train(step)
        return samestep.digest(step.towers.model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


@pytest.mark.long
def test_with_a_loss_of_the_whole_batch():
    def forward(model, part):
        return model(part["x"])

    def spread(model, outputs, batch):
        return -torch.cdist(outputs, outputs).mean() + nn.functional.cross_entropy(outputs, batch["y"])

    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded, forward=forward)
        step.loss_fn = spread
        train(step)
        assert step.towers._opening.plan.is_sharded == (sharded and job.world_size > 1)
        return samestep.digest(step.towers.model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


class Tagger(nn.Module):
    """Its embedding gets sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 300)

    def forward(self, words):
        return self.head(self.embedding(words))


@pytest.mark.long
@pytest.mark.parametrize("kind", [SGD, Adagrad])
def test_sparse_gradients(kind):
    def ends(job, *, sharded):
        model = Tagger()
        towers = Towers(model, 5, job=job)
        optimizer = make(towers, kind, sharded=sharded, params=model.parameters(), lr=0.1)
        step = Step(towers, lambda model, words: model(words).square().mean(), optimizer, clip_norm=0.05)
        norms = [step(torch.arange(number, number + 12) % 40).grad_norm for number in range(3)]
        return samestep.digest(model), norms, towers._opening.plan.is_sharded

    expected = ends(ALONE, sharded=False)
    for num_workers in (2, 3):
        found = values(lambda job: ends(job, sharded=True), num_workers)
        assert found == [(*expected[:2], True)] * num_workers


# ---- who has which gradients ------------------------------------------------------------------------------


def averages_of(step):
    return {name: p.grad for name, p in step.towers.model.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1])
def test_gradients_are_there_where_they_are_asked_for(num_workers):
    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded)
        found = []
        for number in range(5):
            step(batch_of(number), keep_gradients=number % 2 == 1)
            found.append(averages_of(step))
        return found

    expected = ends(ALONE, sharded=False)
    for found in values(lambda job: ends(job, sharded=True), num_workers):
        assert [bool(each) for each in found] == [False, True, False, True, False]
        assert all(same(found[number], expected[number]) for number in (1, 3))


@pytest.mark.long
@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_see_all_gradients(is_global):
    """They may change them, too, on all workers alike."""

    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded)

        def halve(optimizer, *_):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and isinstance(parameter, nn.Parameter):
                        parameter.grad.clamp_(-0.01, 0.01)

        put_on = register_optimizer_step_pre_hook if is_global else step.optimizer.register_step_pre_hook
        handle = put_on(halve)
        train(step)
        handle.remove()
        return samestep.digest(step.towers.model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 1 if is_global else 3) == [expected] * (
        1 if is_global else 3
    )


def test_a_hook_of_one_worker_is_named():
    def ends(job):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=True)
        if job.rank == 1:
            step.optimizer.register_step_pre_hook(lambda *_: None)
        train(step)

    for outcome in simulate(ends, 3):
        assert "step 0: worker 1 has averages = on all workers, the others have in sh" in outcome.text


@pytest.mark.long
def test_a_bare_loop_goes_on_from_there():
    """Steps of one's own, between those of `Step`, have all gradients."""

    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded)
        for number in range(4):
            if number % 2:
                step(batch_of(number))
                continue
            for tower in step.towers(batch_of(number)):
                tower.backward(loss_of(step.towers.model, tower.batch))
            step.towers.average()
            assert averages_of(step)
            step.optimizer.step()
        return samestep.digest(step.towers.model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


@pytest.mark.long
def test_a_net_that_was_small_when_it_was_shared_out(monkeypatch):
    """Its shards cut the blocks of norms, so all workers get all averages when it has grown."""
    monkeypatch.setattr(buckets, "_SMALL_BYTES", 10_000)

    def ends(job, *, sharded):
        model = Net().requires_grad_(False)
        model.second.requires_grad_(True)
        towers = Towers(model, 7, job=job)
        optimizer = make(towers, AdamW, sharded=sharded, params=model.second.parameters(), lr=0.01)
        step = Step(towers, loss_of, optimizer, clip_norm=0.1)
        norms = []
        for number in range(4):
            if number == 2:
                frozen = [p for p in model.parameters() if not p.requires_grad]
                optimizer.add_param_group({"params": frozen, "lr": 0.1})
                model.requires_grad_(True)
            norms.append(step(batch_of(number)).grad_norm)
        assert not towers._opening.plan.is_sharded
        return samestep.digest(model), norms

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


@pytest.mark.long
def test_gradients_of_one_s_own_after_a_step_are_compared():
    def work(job, *, is_apart):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=True)
        step(batch_of(0))
        for parameter in step.towers._last.run.parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + (is_apart and job.rank == 1))
        step.optimizer.step()
        return samestep.digest(step.towers.model)

    assert len(set(values(lambda job: work(job, is_apart=False), 3))) == 1
    for outcome in simulate(lambda job: work(job, is_apart=True), 3):
        assert "worker 1 has hash of the gradient of" in outcome.text


@pytest.mark.long
def test_parameters_of_another_optimizer_are_averaged_for_it():
    def ends(job, *, sharded):
        model = Net()
        towers = Towers(model, 7, job=job)
        other = SGD(model.second.parameters(), lr=0.1)
        listed = {id(p) for p in model.second.parameters()}
        own = [p for p in model.parameters() if id(p) not in listed]
        step = Step(towers, loss_of, make(towers, AdamW, sharded=sharded, params=own, lr=0.01))
        for number in range(3):
            step(batch_of(number), keep_gradients=True)
            other.step()
        return samestep.digest(model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


@pytest.mark.long
@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_layers_may_be_added_and_placements_change(num_workers):
    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded)
        model = step.towers.model
        for number in range(5):
            if number == 2:
                torch.manual_seed(9)
                model.added = nn.Linear(9, 40)
                step.optimizer.add_param_group({"params": list(model.added.parameters()), "lr": 0.1})
                model.second.register_forward_hook(
                    lambda _, inputs, output: output + model.added(inputs[0][:, :9]).mean()
                )
            if number == 3 and job.world_size == 3:
                step.towers.placement = samestep.Placement((0, 1, 6, 7))
            step(batch_of(number))
        return samestep.digest(model), step.optimizer.state_dict(), step.towers._opening.plan.is_sharded

    expected = ends(ALONE, sharded=False)
    for found in values(lambda job: ends(job, sharded=True), num_workers):
        assert same(found[:2], expected[:2])
        assert found[2]


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_explained():
    def ends(job, *, sharded):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=sharded, on_nonfinite="raise")
        batch = batch_of(0)
        batch["x"][4] = math.nan
        with pytest.raises(samestep.NonFiniteError) as caught:
            step(batch)
        step(batch_of(1))
        return str(caught.value), samestep.digest(step.towers.model)

    expected = ends(ALONE, sharded=False)
    assert values(lambda job: ends(job, sharded=True), 3) == [expected] * 3


# ---- faults -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("every", [12, 6, 3])
@pytest.mark.parametrize("rank", [1, 0, 2])
def test_a_worker_that_is_killed_is_named(rank, every):
    for event in range(14 + rank, 60, every):
        outcomes = simulate(lambda job: work_on(job), 3, event, Faults(killed={rank: event}))
        assert isinstance(outcomes[rank].error, Killed)
        for other, outcome in enumerate(outcomes):
            if other != rank:
                assert isinstance(outcome.error, LostWorkerError)


def work_on(job):
    step = step_of(job, AdamW, {"lr": 0.01}, sharded=True)
    for number in range(9):
        step(batch_of(number))


def test_the_share_of_a_gradient_is_all_that_is_kept():
    """No worker keeps averages, or memory for them, from one step to the next."""

    def ends(job):
        step = step_of(job, AdamW, {"lr": 0.01}, sharded=True)
        for number in range(3):
            step(batch_of(number))
        shards = [shard for each in step.optimizer._shards for shard in each]
        assert not any(shard.tensor.grad is not None for shard in shards)
        return step.towers._last.own_averages

    assert values(ends, 3) == [None] * 3


# ---- in a Trainer -----------------------------------------------------------------------------------------


class Seen:
    """Notes after which steps gradients are there."""

    def __init__(self):
        self.steps = []

    def after_step(self, trainer, report):
        if all(parameter.grad is not None for parameter in trainer.model.parameters()):
            self.steps.append(report.step + 1)


class Reader(Seen, samestep.Callback):
    """Looks at gradients after every step."""


class Blind(Reader):
    reads_gradients = False


class EveryThird(Seen, samestep.Logger):
    every = 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("callback", "logger", "expected"),
    mostly_long([(Reader, None, [1, 2, 3, 4, 5, 6, 7]), (Blind, EveryThird, [3, 6]), (Blind, None, [])], 2),
)
def test_gradients_are_there_where_a_callback_or_logger_reads_them(tmp_path, callback, logger, expected):
    def train(job):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 80), nn.ReLU(), nn.Linear(80, 2))
        towers = Towers(model, 7, job=job, seed=3)
        optimizer = ShardedOptimizer(towers, AdamW, lr=0.01)
        step = Step(towers, lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]), optimizer)
        loader = samestep.TowerLoader(examples(), 10, towers, seed=3)
        seen = callback()
        loggers = [logger()] if logger is not None and job.is_first else []  # as many programs do
        options = {"callbacks": [seen], "loggers": loggers, "steps": 7}
        ended = samestep.Trainer(step, loader, run_dir=tmp_path / f"{job.world_size}", **options).run()
        return ended.digest, seen.steps

    (digest, alone), *_ = values(train, 1)
    assert alone == expected
    assert values(train, 3) == [(digest, expected)] * 3
