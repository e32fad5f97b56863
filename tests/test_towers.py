import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import BatchError, BufferPolicyError, ConfigError, UsageError

from .cases import mostly_long
from .integration.placements.sparse import peak_bytes
from .nets import loss_of, take_step

FLOAT64 = torch.float64


def perceptron(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch_of(rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 5, generator=generator, dtype=dtype), "y": torch.arange(rows) % 3}


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("rows", [1, 3, 7, 24, 50, 64])
@pytest.mark.parametrize("num_towers", mostly_long([1, 5, 7, 2, 8, 13], 3))
def test_gradient_is_that_of_the_unsplit_batch(rows, num_towers):
    model, batch = perceptron(FLOAT64), batch_of(rows, FLOAT64)
    report = take_step(Towers(model, num_towers), batch)
    averaged = gradients(model)
    model.zero_grad()
    whole = loss_of(model, batch)
    whole.backward()
    for ours, theirs in zip(averaged, gradients(model), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    assert report.loss == pytest.approx(whole.item(), rel=1e-12)
    assert report.count == report.rows == rows
    assert report.grad_norm == pytest.approx(
        math.sqrt(sum(g.square().sum().item() for g in averaged)), rel=1e-12
    )


def test_gradient_is_the_average_of_towers_gradients_bit_for_bit():
    model, batch = perceptron(), batch_of(32)
    take_step(Towers(model, 8), batch)
    averaged = gradients(model)
    tower_grads = []
    for part in range(8):
        model.zero_grad()
        rows = slice(4 * part, 4 * part + 4)
        loss_of(model, {name: tensor[rows] for name, tensor in batch.items()}).backward()
        tower_grads.append(list(zip(gradients(model), model.parameters(), strict=True)))
    for ours, (theirs, _) in zip(averaged, samestep.average_gradients(tower_grads), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_make_a_mean_over_what_they_count(as_tensor):
    model, batch = perceptron(FLOAT64), batch_of(23, FLOAT64)
    batch["y"][::4] = -100

    def total(part):
        return F.cross_entropy(model(part["x"]), part["y"], reduction="sum", ignore_index=-100)

    towers = Towers(model, 5)
    for tower in towers(batch):
        count = (tower.batch["y"] >= 0).sum()
        tower.backward_sum(total(tower.batch), count if as_tensor else int(count))
    report = towers.average()
    averaged = gradients(model)
    model.zero_grad()
    whole = F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)
    whole.backward()
    for ours, theirs in zip(averaged, gradients(model), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    assert report.count == 17
    assert report.loss == pytest.approx(whole.item(), rel=1e-12)


def test_tower_losses_are_each_towers_mean():
    model, batch = perceptron(), batch_of(6)
    report = take_step(Towers(model, 4), batch)
    parts = [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    expected = [loss_of(model, {k: v[rows] for k, v in batch.items()}).item() for rows in parts]
    assert report.tower_losses == pytest.approx(expected)


def test_a_tower_without_rows_has_no_turn_and_no_loss():
    towers = Towers(perceptron(), 4)
    seen = []
    for tower in towers(batch_of(3)):
        seen.append((tower.index, tower.rows))
        tower.backward(loss_of(towers.model, tower.batch))
    assert seen == [(0, 1), (1, 1), (2, 1)]
    assert math.isnan(towers.average().tower_losses[3])


def test_a_parameter_that_no_tower_uses_keeps_no_gradient():
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    before = copy.deepcopy(model["unused"].state_dict())
    take_step(Towers(model, 3), batch_of(9), lambda model, batch: loss_of(model["used"], batch))
    optimizer.step()
    assert model["unused"].weight.grad is None
    assert torch.equal(model["unused"].weight, before["weight"])


def test_a_parameter_that_one_tower_uses_counts_zero_for_the_others():
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)}).to(FLOAT64)
    towers, batch = Towers(model, 4), batch_of(8, FLOAT64)
    for tower in towers(batch):
        logits = model["a"](tower.batch["x"])
        if tower.index == 2:
            logits = logits + model["b"](tower.batch["x"])
            expected = torch.autograd.grad(
                F.cross_entropy(logits, tower.batch["y"], reduction="sum"),
                model["b"].weight,
                retain_graph=True,
            )[0]
        tower.backward(F.cross_entropy(logits, tower.batch["y"]))
    towers.average()
    assert torch.allclose(model["b"].weight.grad, expected / 8, rtol=1e-12)


def test_memory_formats_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(
        memory_format=torch.channels_last
    )
    towers = Towers(model, 3)
    for tower in towers(torch.randn(6, 3, 4, 4)):
        tower.backward(model(tower.batch).square().mean())
    towers.average()
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.sampled
@pytest.mark.parametrize("num_towers", mostly_long([1, 7, 13, 16, 2, 3, 4, 8, 32], 4))
def test_few_gradients_are_alive_at_a_time(num_towers):
    model = nn.ParameterList([torch.ones(250_000)])
    towers = Towers(model, num_towers)

    def step():
        for tower in towers(torch.ones(num_towers, 1)):
            # Backward makes nothing of the parameter's size but its gradient.
            tower.backward((model[0] * float(tower.batch.mean())).sum())
        towers.average()

    for _ in range(2):  # steps 0 and 1 are followed, and the profiler misses the beginning of the first
        peak_bytes(step)
        model[0].grad = None
    gradients_alive = peak_bytes(step) / 1e6
    assert gradients_alive <= math.ceil(math.log2(num_towers)) + 1 + 0.1
    assert gradients_alive >= math.floor(math.log2(num_towers)) + 1  # or the count saw too little


def averaged_and_error(model, num_towers, batch, **settings):
    """Return p.grad, and how far it is from the exact average of the towers' gradients."""
    towers = Towers(model, num_towers, **settings)
    exact = [torch.zeros_like(p, dtype=FLOAT64) for p in model.parameters()]
    for part in range(num_towers):
        model.zero_grad()
        rows = slice(4 * part, 4 * part + 4)
        loss_of(model, {name: tensor[rows] for name, tensor in batch.items()}).backward()
        for total, parameter in zip(exact, model.parameters(), strict=True):
            total += parameter.grad.double() / num_towers
    take_step(towers, batch)
    error = sum((p.grad.double() - g).square().sum() for p, g in zip(model.parameters(), exact, strict=True))
    return [p.grad for p in model.parameters()], float(error.sqrt())


@pytest.mark.long
def test_half_precision_gradients_are_summed_and_told_in_the_dtype_that_is_asked_for():
    batch = batch_of(128, torch.bfloat16)
    reported, errors = [], []
    for settings, grad_dtype in [
        ({}, torch.bfloat16),
        ({"accumulate_dtype": torch.float32}, torch.bfloat16),
        ({}, torch.float32),
        ({}, None),
        ({"accumulate_dtype": torch.float32}, None),
    ]:
        model = perceptron(torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad_dtype = grad_dtype
        gradients, error = averaged_and_error(model, 32, batch, **settings)
        reported.append({gradient.dtype for gradient in gradients})
        errors.append(error)
    in_half, cast_once, wide, any_dtype, any_wide = errors
    assert reported == [
        {torch.bfloat16},
        {torch.bfloat16},
        {torch.float32},
        {torch.bfloat16},
        {torch.float32},
    ]
    assert 1000 * wide < cast_once < in_half
    assert (any_dtype, any_wide) == (in_half, wide)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_an_optimizer_gets_float32_gradients_of_bfloat16_parameters(momentum):
    """Both on the parameters themselves and on float32 copies of them, so-called master weights."""
    model, batch = perceptron(torch.bfloat16), batch_of(32, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=momentum)
    for_masters = torch.optim.SGD(masters, lr=1e-5, momentum=momentum)
    towers = Towers(model, 8)
    before = [master.clone() for master in masters]
    for _ in range(3):
        take_step(towers, batch)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad
        optimizer.step()  # of this small a rate the parameters hardly see anything
        for_masters.step()
    assert all((m != b).any() for m, b in zip(masters, before, strict=True))
    kept = [state["momentum_buffer"] for state in optimizer.state.values()] if momentum else []
    assert all(buffer.dtype == torch.float32 for buffer in kept)


def test_autograd_hands_its_gradients_over():
    """The averaged gradient of one tower is the very tensor that backward produced."""
    produced = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            produced.append(gradient.data_ptr())
            return gradient

    weight = nn.Parameter(torch.ones(1000))
    model = nn.ParameterList([weight])
    towers = Towers(model, 1)
    for tower in towers(torch.ones(4, 1)):
        tower.backward(Identity.apply(weight).sum() * tower.batch.mean())
    towers.average()
    assert weight.grad.data_ptr() == produced[0]


def test_passes_draw_from_streams_of_seed_step_and_tower():
    def masks(num_towers, seed, steps=1):
        model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))
        towers, found = Towers(model, num_towers, seed=seed), []
        for _ in range(steps):
            for tower in towers(batch_of(8)):
                found.append(torch.rand(4).tolist())
                tower.backward(loss_of(model, tower.batch))
            towers.average()
        return found

    first = masks(4, seed=0, steps=2)
    assert masks(4, seed=0, steps=2) == first
    assert len({tuple(mask) for mask in first}) == 8
    assert masks(8, seed=0)[:4] == first[:4]
    assert not set(map(tuple, masks(4, seed=1))) & set(map(tuple, first))


def test_unfinished_loop_restores_the_generators():
    towers = Towers(perceptron(), 4)
    before = torch.get_rng_state()
    turns = towers(batch_of(8))
    next(turns)
    assert not torch.equal(torch.get_rng_state(), before)
    turns.close()
    assert torch.equal(torch.get_rng_state(), before)


# ---- misuse ----------------------------------------------------------------------------------------


def test_average_before_all_towers_ran():
    towers = Towers(perceptron(), 4)
    turns = towers(batch_of(8))
    tower = next(turns)
    tower.backward(loss_of(towers.model, tower.batch))
    turns.close()
    with pytest.raises(UsageError, match=r"towers 1, 2, 3 have not run"):
        towers.average()


def test_average_without_a_batch():
    with pytest.raises(UsageError, match="without a batch"):
        Towers(perceptron(), 4).average()


def test_a_step_that_was_not_averaged_is_abandoned_by_the_next():
    towers = Towers(perceptron(), 4)
    towers(batch_of(8))
    assert take_step(towers, batch_of(8)).step == 0


def test_a_tower_that_is_skipped():
    turns = Towers(perceptron(), 4)(batch_of(8))
    next(turns)
    with pytest.raises(
        UsageError, match=r"Tower\(index=0, rows=2\): the loop went on before backward was called"
    ):
        next(turns)


def test_a_tower_that_runs_twice():
    towers = Towers(perceptron(), 4)
    tower = next(towers(batch_of(8)))
    tower.backward(loss_of(towers.model, tower.batch))
    with pytest.raises(UsageError, match="has run backward already"):
        tower.backward(loss_of(towers.model, tower.batch))


def test_a_tower_whose_turn_is_over():
    towers = Towers(perceptron(), 4)
    turns = towers(batch_of(8))
    first = next(turns)
    first.backward(loss_of(towers.model, first.batch))
    second = next(turns)
    with pytest.raises(UsageError, match="the loop went on before backward was called"):
        next(turns)
    with pytest.raises(UsageError, match="is not the current tower"):
        second.backward(loss_of(towers.model, second.batch))


def test_backward_past_the_tower():
    towers = Towers(perceptron(), 4)
    turns = towers(batch_of(8))
    loss_of(towers.model, next(turns).batch).backward()
    with pytest.raises(
        UsageError, match=r"loss\.backward\(\) was called, or p\.grad was set, .*tower\.backward_sum\(total"
    ):
        next(turns)


def test_backward_past_the_tower_and_then_through_it():
    towers = Towers(perceptron(), 4)
    tower = next(towers(batch_of(8)))
    loss_of(towers.model, tower.batch).backward()
    with pytest.raises(UsageError, match="parameters already have gradients"):
        tower.backward(loss_of(towers.model, tower.batch))


@pytest.mark.parametrize(
    ("loss", "message"),
    [(lambda p: p.weight, "expected a scalar"), (lambda p: torch.ones(()), "require grad")],
)
def test_a_loss_that_cannot_be_handed_in(loss, message):
    towers = Towers(perceptron(), 4)
    tower = next(towers(batch_of(8)))
    with pytest.raises(UsageError, match=message):
        tower.backward(loss(towers.model[0]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4, 5), "y": torch.zeros(3)}, r"batch\['y'\] has 3 rows, batch\['x'\] has 4"),
        ({"x": torch.zeros(())}, r"batch\['x'\] is a 0-dimensional tensor"),
        ({"name": "x"}, "batch is a dict without tensors"),
        ({"x": torch.zeros(0, 5)}, "the batch has no rows"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    towers = Towers(perceptron(), 2)
    with pytest.raises(BatchError, match=message):
        towers(batch)
    take_step(towers, batch_of(4))  # a refused batch leaves nothing open


def test_slices_of_other_towers_are_refused():
    towers = Towers(perceptron(), 2)
    with pytest.raises(BatchError, match=r"the batch holds towers \[0\], but this worker runs \[0, 1\] of 2"):
        towers(samestep.LocalBatch(4, {0: batch_of(4)}))


def test_weights_that_add_up_to_zero():
    towers = Towers(perceptron(), 2)
    for tower in towers(batch_of(4)):
        tower.backward_sum(loss_of(towers.model, tower.batch), 0)
    with pytest.raises(BatchError, match=r"step 0: the towers' counts add up to 0.*on_zero_count='skip'"):
        towers.average()


# ---- models ----------------------------------------------------------------------------------------


def test_a_model_without_parameters_that_require_grad():
    with pytest.raises(ConfigError, match="Linear has no parameter that requires grad"):
        Towers(nn.Linear(2, 2).requires_grad_(False), 2)


def test_a_model_that_has_no_shapes_yet():
    with pytest.raises(ConfigError, match="parameter weight has no shape yet"):
        Towers(nn.LazyLinear(2), 2)


def test_a_model_on_another_device():
    with pytest.raises(ConfigError, match=r"parameter weight is on meta.*model\.to"):
        Towers(nn.Linear(2, 2, device="meta"), 2, job=samestep.init("cpu"))


@pytest.mark.parametrize("num_towers", [0, -1])
def test_numbers_of_towers_out_of_range(num_towers):
    with pytest.raises(ConfigError, match=f"towers = {num_towers}: expected an int >= 1"):
        Towers(perceptron(), num_towers)


class Remembers(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("memory", value)

    def forward(self, x):
        self.memory += x.sum().to(self.memory.dtype) if self.memory.is_floating_point() else len(x)
        return self.linear(x)


def test_other_floating_buffers_that_change_are_named():
    with pytest.raises(BufferPolicyError, match="tower 0 changed memory"):
        take_step(Towers(Remembers(torch.zeros(3)), 2), batch_of(4))


def test_replaced_buffers_are_named():
    class Replaces(Remembers):
        def forward(self, x):
            self.memory = self.memory + 1
            return self.linear(x)

    with pytest.raises(BufferPolicyError, match="tower 0 changed memory"):
        take_step(Towers(Replaces(torch.zeros(3)), 2), batch_of(4))


def test_counters_count_once_a_step():
    model = Remembers(torch.zeros((), dtype=torch.int64))
    towers = Towers(model, 2)
    for _ in range(3):
        take_step(towers, batch_of(4))
    assert model.memory.item() == 6  # 2 rows a tower, 3 steps


def test_counters_that_depend_on_the_rows_are_an_error():
    with pytest.raises(BufferPolicyError, match="buffer memory is 2 after tower 1, 3 after tower 0"):
        take_step(Towers(Remembers(torch.zeros((), dtype=torch.int64)), 2), batch_of(5))


@pytest.mark.parametrize("name", ["model", "job", "seed", "step"])
def test_what_a_step_would_not_follow_is_read_only(name):
    with pytest.raises(AttributeError, match=f"'{name}'"):
        setattr(Towers(nn.Linear(1, 1), 2), name, None)
