"""One digest, and one state, for any number of workers, with the optimizer sharded or not."""

import copy
import doctest
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn, optim
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

import samestep
from samestep import (
    ConfigError,
    DisagreementError,
    Job,
    LostWorkerError,
    ShardedOptimizer,
    Towers,
    UsageError,
)
from samestep.sharding.cuts import cut

from .cases import mostly_long
from .simulation import Faults, simulate, values

ALONE = Job(torch.device("cpu"))


class Net(nn.Module):
    """Shapes that cuts meet: channels_last, 0-dim, empty, small, unused, frozen."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.conv = nn.Conv2d(16, 33, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(33 * 4, 33), nn.Linear(33, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(9, 11)
        self.to(dtype)

    def forward(self, x):
        hidden = self.first(self.conv(x).flatten(1)).tanh()
        return self.second(self.frozen(hidden)) * self.scale + self.empty.sum()


def batch_of(step, rows=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 16, 4, 4, generator=generator).to(dtype)
    return {"x": x, "y": torch.randint(5, (rows,), generator=generator)}


def loss_of(model, batch):
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def take_step(towers, step, dtype=torch.float32):
    for tower in towers(batch_of(step, 11 if step < 2 else 5, dtype)):
        tower.backward(loss_of(towers.model, tower.batch))
    return towers.average()


def groups_of(model):
    """Two groups, in neither of which all shapes are."""
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if p.ndim > 1]
    return [
        {"params": weights, "lr": 0.03},
        {"params": [p for p in named.values() if p.ndim < 2]},
    ]


def matrices_of(model):
    return [parameter for parameter in model.parameters() if parameter.ndim == 2 and parameter.numel()]


def make(towers, kind, *, sharded, params, **settings):
    return ShardedOptimizer(towers, kind, params, **settings) if sharded else kind(params, **settings)


def bare_loop(job, kind, settings, *, sharded, dtype=torch.float32, params=groups_of):
    """Steps with a schedule and a short last batch, and a layer thawed on the way."""
    model = Net(dtype)
    towers = Towers(model, 7, job=job)
    optimizer = make(towers, kind, sharded=sharded, params=params(model), **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        if step == 2:
            model.frozen.requires_grad_(True)
        take_step(towers, step, dtype)
        optimizer.step()
        schedule.step()
    return samestep.digest(model), optimizer.state_dict(), held(optimizer)


def held(optimizer):
    tensors = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.ndim)


def same(first, second):
    """Whether two nests have the same types, bits and memory formats."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        alike = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
        return alike and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


OPTIMIZERS = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (AdamW, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (AdamW, {"lr": 0.01, "fused": True, "maximize": True}),
    (SGD, {"lr": 0.1, "fused": True}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (Adagrad, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01, "foreach": True}),
]
MORE_OPTIMIZERS = [
    (optim.RAdam, {"lr": 0.01}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.Adadelta, {"lr": 0.1}),
    (optim.ASGD, {"lr": 0.1}),
    (optim.Rprop, {"lr": 0.01}),
]


def check_alike(kind, settings, all_num_workers=(1, 2, 3, 4), **options):
    digest, state, num_bytes = bare_loop(ALONE, kind, settings, sharded=False, **options)
    assert digest != samestep.digest(Net(options.get("dtype", torch.float32)))
    for num_workers in all_num_workers:
        found = values(lambda job: bare_loop(job, kind, settings, sharded=True, **options), num_workers)
        for own_digest, own_state, _ in found:
            assert own_digest == digest
            assert same(own_state, state)
        assert sum(own for _, _, own in found) == num_bytes


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "settings"), mostly_long(OPTIMIZERS, 4), ids=lambda each: getattr(each, "__name__", "")
)
def test_weights_and_state_are_those_of_the_plain_optimizer(kind, settings):
    check_alike(kind, settings, (3,))


@pytest.mark.long
def test_on_each_number_of_workers():
    check_alike(AdamW, {"lr": 0.01})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("kind", "settings"), OPTIMIZERS + MORE_OPTIMIZERS, ids=lambda each: getattr(each, "__name__", "")
)
def test_on_each_number_of_workers_and_in_each_precision(kind, settings, dtype):
    check_alike(kind, settings, dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(AdamW, {"lr": 0.1}), (AdamW, {"lr": 0.1, "fused": True}), (SGD, {"lr": 0.1, "momentum": 0.9})],
    ids=["AdamW", "fused AdamW", "SGD"],  # for fused SGD see https://github.com/pytorch/pytorch/issues/191763
)
def test_and_in_half_precision(kind, settings):
    check_alike(kind, settings, (3,), dtype=torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon], ids=["Adafactor", "Muon"])
def test_other_optimizers_update_whole_parameters(kind):
    check_alike(kind, {"lr": 0.01}, (2, 3), params=matrices_of)


class Clipping(SGD):
    """Clips by the norm of all gradients, as some of LAMB do."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


class Noisy(SGD):
    """Draws random numbers, as for stochastic rounding."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.rand_like(parameter))


class LateNoise(SGD):
    """Adds noise from the fourth step on, when it is no longer tried."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"] if group["count"] > 3 else ():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 1, 2])
def test_random_numbers_in_an_update_are_refused_on_all_workers(num_workers):
    def work(job):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        towers = Towers(model, 5, job=job)
        optimizer = ShardedOptimizer(towers, LateNoise, lr=0.1)
        for _ in range(4):
            for tower in towers(torch.ones(10, 6)):
                tower.backward(model(tower.batch).square().mean())
            towers.average()
            optimizer.step()

    for outcome in simulate(work, num_workers):
        assert "LateNoise draws random numbers in step()" in outcome.text


class Counting(SGD):
    """Keeps something beside its parameters."""

    def step(self, closure=None):
        self.state["all"]["step"] = 1
        return super().step(closure)


class Own(SGD):
    def state_dict(self):
        return {**super().state_dict(), "own": 1}


class Splitting(SGD):
    """Makes two groups of one."""

    def __init__(self, params):
        params = [p for group in params for p in group["params"]]
        super().__init__([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)


class Filtering(SGD):
    """Leaves out biases."""

    def add_param_group(self, group):
        super().add_param_group({**group, "params": [p for p in group["params"] if p.ndim > 1]})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            Clipping,
            {"lr": 0.1},
            "Clipping cannot be sharded: its update of a parameter depends on other parameters",
        ),
        (
            Noisy,
            {"lr": 0.1},
            "Noisy cannot be sharded: its update of a parameter depends on other parameters",
        ),
        (
            Counting,
            {"lr": 0.1},
            "Counting cannot be sharded: it keeps state that belongs to no single parameter",
        ),
        (Own, {"lr": 0.1}, "Own cannot be sharded: it keeps state that belongs to no single parameter"),
        (optim.LBFGS, {"lr": 0.1}, r"LBFGS cannot be sharded: .* missing 1 required positional argument"),
        (AdamW, {"differentiable": True}, "differentiable = True: no gradient flows"),
        (Splitting, {}, "Splitting cannot be sharded: it leaves out parameters, or makes other groups"),
        (Filtering, {"lr": 0.1}, "Filtering cannot be sharded: it leaves out parameters, or makes"),
        (torch.optim, {}, "optimizer_class = <module .*>: expected a class, such as torch.optim.AdamW"),
    ],
)
def test_what_cannot_be_sharded_is_refused(kind, settings, message):
    towers = Towers(nn.Linear(2, 2), 2)
    with pytest.raises(ConfigError, match=message):
        ShardedOptimizer(towers, kind, **settings)


def test_a_derived_class_is_not_taken_for_elementwise():
    class Derived(AdamW):
        pass

    def most(job, kind):
        towers = Towers(nn.Linear(64, 10), 2, job=job)
        optimizer = ShardedOptimizer(towers, kind, lr=0.1)
        return [len(shards) for shards in optimizer._shards]

    assert values(lambda job: most(job, Derived), 2) == [[1, 1]] * 2
    assert values(lambda job: most(job, AdamW), 2) == [[2, 1]] * 2


def test_on_several_threads_kernels_cut_tensors_themselves():
    def num_shards(job):
        towers = Towers(nn.Linear(64, 10), 2, job=job)
        return [len(shards) for shards in ShardedOptimizer(towers, AdamW)._shards]

    torch.set_num_threads(2)
    assert values(num_shards, 2) == [[1, 1]] * 2


def test_each_frozen_parameter_is_cut_as_it_may_be_trained_alone():
    def num_shards(job):
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False).requires_grad_(n == 0) for n in range(3)))
        return [len(shards) for shards in ShardedOptimizer(Towers(model, 4, job=job), AdamW)._shards]

    assert values(num_shards, 4) == [[4, 4, 4]] * 4


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_each_worker_keeps_its_part_of_the_state(num_workers):
    def work(job, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 30), nn.Linear(30, 7))
        towers = Towers(model, 5, job=job)
        optimizer = make(towers, AdamW, params=model.parameters(), **options)
        for tower in towers(torch.randn(10, 200)):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()
        return held(optimizer)

    whole = work(ALONE, sharded=False)
    parts = values(lambda job: work(job, sharded=True), num_workers)
    assert sum(parts) == whole
    assert max(parts) <= whole / num_workers + 2 * 4 * 64  # two moments, float32, a cut at 64 elements


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 9))
def test_each_element_is_one_worker_s(sizes, num_workers):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    loads = [0] * num_workers
    for parameter, shards in zip(parameters, cut(parameters, loads), strict=True):
        assert [n for shard in shards for n in shard.elements] == list(range(parameter.numel()))
        assert shards
        assert all(shard.elements.start % 64 == 0 for shard in shards)
        assert len({shard.worker for shard in shards}) == len(shards)


# ---- what users do beside it -----------------------------------------------------------------------------


class Slow(SGD):
    """Has another default for groups that are added."""

    def add_param_group(self, group):
        group.setdefault("lr", 0.01)
        super().add_param_group(group)


def growing_loop(job, *, sharded):
    model = Net()
    towers = Towers(model, 5, job=job)
    optimizer = make(towers, Slow, sharded=sharded, params=[model.conv.weight], lr=0.1)
    optimizer.add_param_group({"params": model.second.parameters(), "momentum": 0.9})
    for step in range(3):
        take_step(towers, step)
        for parameter in {*model.parameters()} - {p for g in optimizer.param_groups for p in g["params"]}:
            parameter.grad = None
        optimizer.step()
    return samestep.digest(model), optimizer.state_dict()


@pytest.mark.long
def test_a_class_decides_on_the_defaults_of_groups_that_are_added():
    digest, state = growing_loop(ALONE, sharded=False)
    for found in values(lambda job: growing_loop(job, sharded=True), 2):
        assert found[0] == digest
        assert same(found[1], state)


def embedding_loop(job, kind, settings, *, sharded):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 30)
    model = nn.Sequential(embedding, head)
    towers = Towers(model, 5, job=job)
    params = [embedding.weight] if kind is optim.SparseAdam else model.parameters()
    optimizer = make(towers, kind, sharded=sharded, params=params, **settings)
    for step in range(3):
        rows = torch.randint(40, (12,), generator=torch.Generator().manual_seed(step))
        for tower in towers(rows):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    state = pytree.tree_map_only(torch.Tensor, torch.Tensor.to_dense, optimizer.state_dict())
    return samestep.digest(model), state


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(SGD, {"momentum": 0.9}), (optim.SparseAdam, {}), (SGD, {}), (Adagrad, {})],
    ids=["SGD with sparse momentum", "SparseAdam", "SGD", "Adagrad"],
)
def test_sparse_gradients(kind, settings):
    settings = {"lr": 0.1, **settings}
    digest, state = embedding_loop(ALONE, kind, settings, sharded=False)
    for num_workers in (1, 2, 3):
        found = values(lambda job: embedding_loop(job, kind, settings, sharded=True), num_workers)
        for own_digest, own_state in found:
            assert own_digest == digest
            assert same(own_state, state)


def scaled_loop(job, *, sharded, fused):
    """A loop with a `GradScaler`, whose scale overflows on the way."""
    model = Net()
    towers = Towers(model, 5, job=job)
    optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2, backoff_factor=0.3)
    for step in range(4):
        batch = batch_of(step)
        if step == 1:
            batch["x"][3] = math.inf
        for tower in towers(batch, scaler=scaler):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() != 1000.0
    return samestep.digest(model), optimizer.state_dict()


@pytest.mark.parametrize("fused", mostly_long([True, False], 1))
def test_a_scaler_skips_steps_and_fused_optimizers_unscale_themselves(fused):
    digest, state = scaled_loop(ALONE, sharded=False, fused=fused)
    for own_digest, own_state in values(lambda job: scaled_loop(job, sharded=True, fused=fused), 3):
        assert own_digest == digest
        assert same(own_state, state)


def test_a_state_of_another_memory_format_is_loaded():
    def work(job):
        towers = Towers(Net(), 5, job=job)
        optimizer = ShardedOptimizer(towers, AdamW, lr=0.01)
        take_step(towers, 0)
        optimizer.step()
        state = optimizer.state_dict()
        moments = [entry["exp_avg"] for entry in state["state"].values()]
        for entry, moment in zip(state["state"].values(), moments, strict=True):
            entry["exp_avg"] = moment.contiguous()
        optimizer.load_state_dict(state)
        loaded = [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]
        return all(map(torch.equal, loaded, moments))

    assert values(work, 2) == [True] * 2


@pytest.mark.long
def test_layers_may_be_added():
    def work(job, *, sharded):
        model = Net()
        towers = Towers(model, 5, job=job)
        optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.01)
        take_step(towers, 0)
        optimizer.step()
        model.frozen = nn.Sequential(model.frozen, nn.Linear(33, 33))
        optimizer.add_param_group({"params": model.frozen[1].parameters(), "lr": 0.1})
        for step in (1, 2):
            take_step(towers, step)
            optimizer.step()
        return samestep.digest(model), optimizer.state_dict()

    torch.manual_seed(5)  # what the layer is made of, which worker 0 shares
    digest, state = work(ALONE, sharded=False)
    torch.manual_seed(5)
    for own_digest, own_state in values(lambda job: work(job, sharded=True), 3):
        assert own_digest == digest
        assert same(own_state, state)


def test_closures_hooks_and_names_are_as_users_know():
    model = nn.Linear(2, 1)
    towers = Towers(model, 2)
    optimizer = ShardedOptimizer(towers, AdamW, model.named_parameters(), lr=0.1)
    calls = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(type(optimizer)))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})

    def closure():
        assert torch.is_grad_enabled()
        for tower in towers(torch.ones(4, 2)):
            tower.backward(model(tower.batch).square().mean())
        return towers.average().loss

    assert optimizer.step(closure) > 0
    handle.remove()
    assert calls == ["pre", "post", ShardedOptimizer]
    state = optimizer.state_dict()
    assert state["mine"] == 1
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert repr(optimizer).startswith("ShardedOptimizer of AdamW (\nParameter Group 0")
    assert optimizer.defaults["lr"] == 0.1
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(optimizer)


def test_a_step_without_an_average():
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(Towers(model, 2), AdamW, lr=0.1)
    optimizer.step()  # nothing has a gradient, as where a schedule is made before the first step
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        UsageError, match=r"shape \[1, 2\] has a gradient that is not an average over all towers"
    ):
        optimizer.step()


def test_groups_that_were_changed_by_hand():
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(Towers(model, 2), AdamW, [{"params": p} for p in model.parameters()])
    groups = optimizer.param_groups
    for changed in (groups[:1], groups[::-1], [*groups, groups[0]]):
        optimizer.param_groups = changed
        with pytest.raises(
            UsageError, match="parameters, which are not the 2 that are sharded, in this order"
        ):
            optimizer.step()
    optimizer.param_groups = groups
    groups[1]["params"] = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(UsageError, match="param_groups have 2 parameters, which are not the 2"):
        optimizer.step()


def test_a_layer_that_was_replaced_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    towers = Towers(model, 2)
    optimizer = ShardedOptimizer(towers, SGD, lr=0.1)

    def step():
        for tower in towers(torch.ones(4, 2)):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()

    step()
    model[1] = nn.Linear(3, 1)
    with pytest.raises(UsageError, match="it is not part of the model; if its layer was replaced, pass the"):
        step()
    optimizer.zero_grad()
    model.zero_grad()
    optimizer.add_param_group({"params": model[1].parameters()})
    step()
    optimizer.zero_grad()
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(UsageError, match="none of the optimizer's parameters is part of the model any more"):
        step()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "read",
    [
        lambda state, p: state[p]["exp_avg"].zero_(),
        lambda state, p: p in state,
        lambda state, p: state.get(p),
        lambda state, p: state.pop(p, None),
        lambda state, p: state.__setitem__(p, {}),
    ],
    ids=["get item", "in", "get", "pop", "set item"],
)
def test_the_state_of_parameters_that_others_update_is_not_taken_for_missing(read):
    """As in code that starts single neurons over, and so resets their moments."""

    def work(job):
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40))
        towers = Towers(model, 3, job=job)
        optimizer = ShardedOptimizer(towers, AdamW, lr=0.1)
        for tower in towers(torch.ones(6, 40)):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert sum(entry["exp_avg"].numel() for entry in optimizer.state.values()) > 0
        for parameter in model.parameters():
            read(optimizer.state, parameter)

    for num_workers in (1, 2, 3):
        for outcome in simulate(work, num_workers):
            expected = "UsageError: optimizer.state of a parameter of shape" if num_workers > 1 else ""
            assert outcome.text.startswith(expected)
            assert bool(outcome.text) == bool(expected)


def test_a_state_that_cannot_be_cut_is_an_error_on_all_workers():
    def work(job):
        towers = Towers(nn.Linear(40, 30), 3, job=job)
        optimizer = ShardedOptimizer(towers, AdamW, lr=0.1)
        state = AdamW(nn.Linear(40, 30).parameters()).state_dict()
        state["state"][1] = {"step": torch.zeros(()), "exp_avg": torch.zeros(30)}  # of one worker
        state["state"][0] = {"step": torch.zeros(()), "exp_avg": torch.zeros(30, 2)}  # of workers 0 and 1
        optimizer.load_state_dict(state)

    for outcome in simulate(work, 3):
        assert outcome.text == (
            "ValueError: loaded state dict: exp_avg of a parameter has shape [30, 2], the parameter [30, 40]"
        )


def test_a_second_update_after_that_of_a_step():
    def work(job):
        towers = Towers(nn.Linear(2, 1), 3, job=job)
        step = samestep.Step(towers, lambda model, x: model(x).mean(), ShardedOptimizer(towers, SGD, lr=0.1))
        step(torch.ones(4, 2))
        step(torch.ones(4, 2), keep_gradients=True)
        step.optimizer.step()
        step(torch.ones(4, 2))
        step.optimizer.step()

    for num_workers in (1, 2):
        for outcome in simulate(work, num_workers):
            assert "UsageError: step() has no gradients, because a Step has already taken" in outcome.text


@pytest.mark.long
def test_two_optimizers_for_one_average():
    def work(job, *, sharded):
        model = Net()
        towers = Towers(model, 5, job=job)
        matrices = matrices_of(model)
        rest = [p for p in model.parameters() if all(p is not each for each in matrices)]
        optimizers = [
            make(towers, optim.Muon, sharded=sharded, params=matrices, lr=0.01),
            make(towers, AdamW, sharded=sharded, params=rest, lr=0.01),
        ]
        for step in range(3):
            take_step(towers, step)
            for optimizer in optimizers:
                optimizer.step()
        return samestep.digest(model)

    assert values(lambda job: work(job, sharded=True), 3) == [work(ALONE, sharded=False)] * 3


def test_a_parameter_of_another_format_is_named():
    model = nn.Conv2d(4, 4, 3)
    towers = Towers(model, 2)
    optimizer = ShardedOptimizer(towers, AdamW, lr=0.1)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(
        UsageError, match=r"\[4, 4, 3, 3\], strides .* create the ShardedOptimizer after such a change"
    ):
        optimizer.step()


def test_a_graph_from_before_the_step_is_found_out():
    def versions(job):
        model = Net()
        towers = Towers(model, 5, job=job)
        optimizer = ShardedOptimizer(towers, SGD, lr=0.01)
        take_step(towers, 0)
        before = [p._version for p in model.parameters() if p.grad is not None]
        optimizer.step()
        after = [p._version for p in model.parameters() if p.grad is not None]
        return all(new > old for new, old in zip(after, before, strict=True))

    assert values(versions, 3) == [True] * 3


@pytest.mark.long
def test_parameters_may_move():
    def work(job, *, sharded):
        model = Net()
        towers = Towers(model, 5, job=job)
        optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.01)
        for step in range(3):
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            take_step(towers, step)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        return samestep.digest(model)

    assert values(lambda job: work(job, sharded=True), 3) == [work(ALONE, sharded=False)] * 3


# ---- what goes wrong on one worker -----------------------------------------------------------------------


def failing(job, what, num_steps=6, lr=0.01):
    model = Net()
    towers = Towers(model, 5, job=job)
    optimizer = ShardedOptimizer(towers, AdamW, lr=copy.deepcopy(lr))
    for step in range(num_steps):
        take_step(towers, step)
        if step == 2 and job.rank == 1:
            what(optimizer)
        optimizer.step()


def raises(optimizer):
    def step():
        raise RuntimeError("out of memory")

    optimizer._update_shards = step


def another_rate(optimizer):
    optimizer.param_groups[0]["lr"] = 0.5


def interrupts(optimizer):
    def step():
        raise KeyboardInterrupt

    optimizer._update_shards = step


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        (
            raises,
            "RuntimeError: out of memory",
            "step 2, the update: worker 1 failed: RuntimeError: out of memory",
        ),
        (
            another_rate,
            *["step 2, the update: worker 1 has lr of parameter group 0 = 0.5, the others have 0.01"] * 2,
        ),
        (interrupts, "KeyboardInterrupt", "LostWorkerError"),
    ],
    ids=["raises", "another rate", "interrupts"],
)
def test_all_hear_of_it(what, own, others):
    for seed in range(2):
        outcomes = simulate(lambda job: failing(job, what), 3, seed)
        for rank, outcome in enumerate(outcomes):
            assert (own if rank == 1 else others) in outcome.text


@pytest.mark.sampled
@pytest.mark.parametrize("is_gradient", [True, False])
def test_gradients_and_weights_that_have_come_apart_are_found(is_gradient):
    def change(optimizer):
        def work(*_):
            for parameter in optimizer.param_groups[0]["params"]:
                if parameter.grad is not None:
                    (parameter.grad if is_gradient else parameter.data).mul_(1.001)

        optimizer.register_step_pre_hook(work)

    for outcome in simulate(lambda job: failing(job, change, 20), 3):
        assert isinstance(outcome.error, DisagreementError)
        assert "worker 1 has hash of " in outcome.text
        assert ("hash of the gradient of" in outcome.text) == is_gradient


def test_a_rate_that_is_a_tensor_is_compared():
    def change(optimizer):
        optimizer.param_groups[0]["lr"].mul_(2)

    for outcome in simulate(lambda job: failing(job, change, lr=torch.tensor(0.01)), 2):
        assert "has lr of parameter group 0 = tensor(0.0200)" in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 0, 2])
def test_a_worker_that_is_killed_is_named(rank):
    for event in range(20 + rank, 32, 3):
        outcomes = simulate(lambda job: failing(job, id), 3, event, Faults(killed={rank: event}))
        for other, outcome in enumerate(outcomes):
            if other != rank:
                assert isinstance(outcome.error, LostWorkerError)


def test_one_that_makes_another_is_found():
    def work(job):
        towers = Towers(nn.Linear(2, 2), 3, job=job)
        ShardedOptimizer(towers, AdamW, lr=0.1 + (job.rank == 1))

    for outcome in simulate(work, 3):
        assert (
            "ShardedOptimizer: worker 1 has lr of parameter group 0 = 1.1, the others have 0.1"
            in outcome.text
        )


def test_one_that_has_them_in_another_order_is_found():
    def work(job):
        model = nn.Linear(2, 2), nn.Linear(2, 2)
        towers = Towers(nn.Sequential(*model), 3, job=job)
        ShardedOptimizer(towers, AdamW, [each.weight for each in model[:: -1 if job.rank == 2 else 1]])

    for outcome in simulate(work, 3):
        assert "worker 2 has parameters[0] = 1.weight [2, 2] strides" in outcome.text


def test_one_that_cannot_make_it_tells_the_others():
    def work(job):
        towers = Towers(nn.Linear(2, 2), 3, job=job)
        ShardedOptimizer(towers, AdamW, lr=-1 if job.rank == 1 else 0.1)

    texts = [outcome.text for outcome in simulate(work, 3)]
    assert "worker 1 failed: ValueError: Invalid learning rate: -1" in texts[0]
    assert texts[1] == "ValueError: Invalid learning rate: -1"


@pytest.mark.long
def test_its_page():
    page = Path(__file__).parents[1] / "docs" / "sharded_optimizer.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0
