import collections
import copy
import gc
import random
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import LocalBatch, Step, Towers
from samestep.errors import BatchError, BufferPolicyError, UsageError
from samestep.streams import keep_globals, seed_globals, tower_seed
from samestep.summation.placement import even_ranges

from .simulation import values

pytestmark = pytest.mark.sampled(5)

FLOAT64 = torch.float64

of_own_rows = pytest.mark.filterwarnings("ignore:Tower.* compares rows with each other")


class TwoEncoders(nn.Module):
    """Embeds two views of a row. The loss uses `log_scale`; forward and loss both use `shift`."""

    def __init__(self, *middle, dtype=FLOAT64):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(5, 16), *middle, nn.Tanh(), nn.Linear(16, 4))
        self.right = nn.Linear(6, 4)
        self.shift = nn.Parameter(torch.full((4,), 0.1))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, batch):
        return {
            "left": F.normalize(self.left(batch["left"]) + self.shift),
            "right": F.normalize(self.right(batch["right"])),
        }


def info_nce(model, outputs, batch):
    logits = model.log_scale.exp() * outputs["left"] @ (outputs["right"] - model.shift).T
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def chi_squared(model, outputs, batch):
    """Return the χ² between soft histograms, with few entries per bin, of an output and of an input."""
    edges = torch.linspace(-1, 1, 12, dtype=outputs["left"].dtype)

    def histogram(values):
        return torch.exp(-((values[:, None] - edges) ** 2) / 0.05).sum(0) + 0.5

    expected = histogram(batch["left"][:, 0])
    return ((histogram(outputs["left"][:, 0]) - expected) ** 2 / expected).sum()


def batch_of(rows, dtype=FLOAT64):
    generator = torch.Generator().manual_seed(rows)
    return {
        "left": torch.randn(rows, 5, generator=generator, dtype=dtype),
        "right": torch.randn(rows, 6, generator=generator, dtype=dtype),
    }


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def run(towers, batch, loss, forward=None, scaler=None):
    towers.whole_batch(batch, forward or towers.model, partial(loss, towers.model), scaler=scaler)
    return towers.average()


def unsplit(model, batch, loss):
    model.zero_grad()
    value = loss(model, model(batch), batch)
    value.backward()
    return value.item(), gradients(model)


def towers_alive(model, batch, loss, num_towers, seed=0):
    """Compute the same gradient as `whole_batch`, but with the graphs of all towers in memory."""
    model.zero_grad()
    rows = len(batch["left"])
    parts = []
    with keep_globals(torch.device("cpu")):
        for tower, taken in enumerate(even_ranges(rows, num_towers)):
            if taken:
                seed_globals(tower_seed(seed, 0, tower), torch.device("cpu"))
                parts.append(model({k: v[taken.start : taken.stop] for k, v in batch.items()}))
    outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    value = loss(model, outputs, batch)
    value.backward()
    return value.item(), gradients(model)


def assert_close(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None, name
        else:
            assert torch.allclose(ours[name], expected, rtol=tolerance, atol=tolerance), name


# ---- the gradient ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [info_nce, chi_squared])
@pytest.mark.parametrize(("num_towers", "rows"), [(1, 9), (4, 16), (7, 30), (7, 4), (5, 5)])
def test_gradient_is_that_of_the_unsplit_batch(num_towers, rows, loss):
    model, batch = TwoEncoders(), batch_of(rows)
    report = run(Towers(model, num_towers), batch, loss)
    ours = gradients(model)
    value, theirs = unsplit(model, batch, loss)
    assert_close(ours, theirs)
    assert report.loss == pytest.approx(value, rel=1e-12)
    assert ours["unused"] is None
    if loss is chi_squared:
        assert ours["right.weight"] is None  # the loss asks for it nowhere


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "told"), [(info_nce, "compares rows"), (chi_squared, "pow of means of features over rows")]
)
def test_the_mean_over_towers_is_a_different_gradient(loss, told):
    model, batch = TwoEncoders(), batch_of(16)
    towers = Towers(model, 4)

    def run_passes():
        for tower in towers(batch):
            tower.backward(loss(model, model(tower.batch), tower.batch))

    with pytest.warns(UserWarning, match=told):
        run_passes()
    towers.average()
    ours = gradients(model)["left.0.weight"]
    theirs = unsplit(model, batch, loss)[1]["left.0.weight"]
    assert (ours - theirs).norm() > 0.1 * theirs.norm()


@pytest.mark.parametrize("middle", [[nn.Dropout(0.4)], [nn.BatchNorm1d(16), nn.Dropout(0.2)]])
def test_dropout_and_batch_norm_do_the_same_in_both_passes(middle):
    model, batch = TwoEncoders(*middle), batch_of(30)
    value, theirs = towers_alive(copy.deepcopy(model), batch, info_nce, num_towers=7, seed=5)
    report = run(Towers(model, 7, seed=5), batch, info_nce)
    assert_close(gradients(model), theirs)
    assert report.loss == pytest.approx(value, rel=1e-12)


def test_all_generators_are_replayed_and_restored():
    model, drawn = TwoEncoders(), []

    def forward(batch):
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return model(batch)

    def loss(outputs, batch):
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return info_nce(model, outputs, batch)

    towers = Towers(model, 3)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    for _ in range(2):
        towers.whole_batch(batch_of(6), forward, loss)
        towers.average()
    first, of_loss, again = drawn[:3], drawn[3], drawn[4:7]
    assert first == again
    assert len({*first, of_loss, *drawn[7:11]}) == 8  # different for each tower, the loss, and each step
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@of_own_rows
def test_towers_draw_the_same_numbers_as_in_a_loop():
    drawn = []
    towers = Towers(TwoEncoders(), 3, seed=4)

    def forward(batch):
        drawn.append(torch.rand(1).item())
        return towers.model(batch)

    run(towers, batch_of(6), info_nce, forward)
    others = Towers(TwoEncoders(), 3, seed=4)
    for tower, expected in zip(others(batch_of(6)), drawn, strict=False):
        assert torch.rand(1).item() == expected
        tower.backward(info_nce(others.model, others.model(tower.batch), None))


@pytest.mark.long
def test_a_forward_may_write_to_its_batch():
    model, batch = TwoEncoders(), batch_of(10)

    def forward(part):
        part["left"] *= 2
        return model(part)

    whole = copy.deepcopy(batch)
    expected = unsplit(model, {**batch, "left": batch["left"] * 2}, info_nce)[1]
    for given in (whole, local(batch, 3)):
        run(Towers(model, 3), given, info_nce, forward)
        assert_close(gradients(model), expected)
    assert torch.equal(whole["left"], batch["left"])


# ---- nests -----------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["values", "others"])


def test_nests_integers_and_outputs_that_the_loss_does_not_use():
    model, batch = TwoEncoders(), batch_of(11)
    batch["label"] = torch.arange(11) % 4
    seen = {}

    def forward(part):
        outputs = model(part)
        # Outputs with two rows per row of the batch, of integers, without grad, and unused by the loss.
        doubled = torch.stack([outputs["left"], 2 * outputs["left"]], 1).flatten(0, 1)
        return [Pair(doubled, part["label"]), (outputs["right"], {"plain": part["right"]})]

    def loss(outputs, batch):
        (doubled, label), (_, rest) = outputs
        seen.update(doubled=doubled, label=label, plain=rest["plain"], batch=batch)
        return (doubled.view(11, -1).logsumexp(0) * (label.double().mean() + rest["plain"].mean())).prod()

    towers = Towers(model, 4)
    towers.whole_batch(batch, forward, loss)
    towers.average()
    ours = gradients(model)
    model.zero_grad()
    loss(forward(batch), batch).backward()
    assert_close(ours, gradients(model))
    assert ours["right.weight"] is None
    assert torch.equal(seen["label"], batch["label"])
    assert torch.equal(seen["plain"], batch["right"])
    assert torch.equal(seen["batch"]["left"], batch["left"])


@pytest.mark.parametrize("num_towers", [1, 3])
def test_the_loss_may_work_in_place(num_towers):
    model, batch = TwoEncoders(), batch_of(8)

    def in_place(model, outputs, batch):
        outputs["left"] *= model.log_scale.exp()
        return (outputs["left"] @ outputs["right"].T).logsumexp(0).mean()

    run(Towers(model, num_towers), batch, in_place)
    ours = gradients(model)
    assert_close(ours, unsplit(model, batch, in_place)[1])


def test_a_loss_of_parameters_alone_counts_once():
    model = TwoEncoders()
    report = run(Towers(model, 4), batch_of(8), lambda model, outputs, batch: model.shift.square().sum())
    assert torch.equal(model.shift.grad, 2 * model.shift)
    assert model.left[0].weight.grad is None
    assert report.loss == pytest.approx(0.04)


def test_outputs_have_contiguous_strides_in_the_loss():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = []

    def loss(outputs, batch):
        strides.append(outputs.stride())
        return outputs.square().mean().log()

    for num_towers in (1, 3):
        towers = Towers(model, num_towers)
        towers.whole_batch(torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last), model, loss)
        towers.average()
    assert strides == [(36, 9, 3, 1)] * 2


# ---- buffers ---------------------------------------------------------------------------------------


@of_own_rows
@pytest.mark.parametrize("statistics", ["mean", "pooled", "first"])
def test_batch_norm_counts_once(statistics):
    model = TwoEncoders(nn.BatchNorm1d(16, momentum=None), nn.BatchNorm1d(16))
    other = copy.deepcopy(model)
    towers = Towers(model, 4, statistics=statistics)
    others = Towers(other, 4, statistics=statistics)
    for _ in range(2):
        run(towers, batch_of(18), info_nce)
        for tower in others(batch_of(18)):
            tower.backward(info_nce(other, other(tower.batch), None))
        others.average()
    assert model.left[1].num_batches_tracked == 2
    assert samestep.digest(dict(model.named_buffers())) == samestep.digest(dict(other.named_buffers()))
    assert model.left[1].momentum is None


def test_the_first_pass_leaves_buffers_as_they_were():
    model = TwoEncoders(nn.BatchNorm1d(16))
    before = samestep.digest(model)
    seen = []

    def loss(outputs, batch):
        seen.append(samestep.digest(model))
        return info_nce(model, outputs, batch)

    Towers(model, 4).whole_batch(batch_of(18), model, loss)
    assert seen == [before]


def test_a_queue_that_the_loss_writes_to():
    model = TwoEncoders()
    model.register_buffer("queue", torch.zeros(6, 4, dtype=FLOAT64))
    left = []

    def loss(outputs, batch):
        left.append(outputs["left"].detach().clone())
        value = info_nce(model, outputs, batch) + (outputs["left"] @ model.queue.T.clone()).mean()
        model.queue.copy_(left[-1])
        return value

    towers = Towers(model, 3)
    for _ in range(2):
        towers.whole_batch(batch_of(6), model, loss)
        towers.average()
    assert torch.equal(model.queue, left[-1])


def test_a_buffer_without_a_policy_is_an_error():
    class Remembers(TwoEncoders):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(2, dtype=FLOAT64))

        def forward(self, batch):
            self.memory = self.memory + batch["left"].sum()
            return super().forward(batch)

    model = Remembers()
    with pytest.raises(BufferPolicyError, match="tower 0 changed memory"):
        run(Towers(model, 2), batch_of(4), info_nce)


# ---- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_the_call_or_in_the_forward(inside):
    model, batch = TwoEncoders(nn.Dropout(0.2), dtype=torch.float32), batch_of(12, torch.float32)
    seen = []

    def cast(batch):
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            return {"left": model.left(batch["left"]), "right": model.right(batch["right"])}

    def loss(model, outputs, batch):
        seen.append(outputs["left"].dtype)
        return (outputs["left"] @ outputs["right"].T).float().logsumexp(0).mean()

    with nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        run(Towers(model, 1), batch, loss, cast)
        ours = gradients(model)
        model.zero_grad()
        with keep_globals(torch.device("cpu")):
            seed_globals(tower_seed(0, 0, 0), torch.device("cpu"))
            loss(model, cast(batch), batch).backward()
    assert seen == [torch.bfloat16] * 2
    assert_close(ours, gradients(model), tolerance=1e-2)
    assert ours["left.0.weight"] is not None


def test_autocast_around_the_call_casts_weights_again_for_the_second_pass():
    model = TwoEncoders(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run(Towers(model, 3), batch_of(12, torch.float32), info_nce)
    assert model.left[0].weight.grad.abs().sum() > 0
    assert model.right.weight.grad.abs().sum() > 0


@pytest.mark.long
def test_autocast_around_the_call_has_no_effect_on_backward():
    model, batch = TwoEncoders(dtype=torch.float32), batch_of(12, torch.float32)

    def without_autocast(function):
        def call(*args):
            with torch.autocast("cpu", enabled=False):
                return function(*args)

        return call

    digests = set()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            run(Towers(model, 3), batch, without_autocast(info_nce), without_autocast(model))
        digests.add(samestep.digest({name: g for name, g in gradients(model).items() if g is not None}))
    assert len(digests) == 1


def test_a_loss_scale_is_applied_once():
    model, batch = TwoEncoders(), batch_of(12)
    towers = Towers(model, 4)
    report = run(towers, batch, info_nce)
    plain = gradients(model)
    scaled = run(towers, batch, info_nce, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert scaled.loss == report.loss
    for name, gradient in gradients(model).items():
        assert gradient is None or torch.equal(gradient, 1024 * plain[name]), name


def test_small_gradients_of_half_precision_outputs_survive_with_a_scale():
    model = nn.Linear(4, 2)
    towers = Towers(model, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    forward, loss = lambda x: model(x).half(), lambda out, _: out.sum().float() * 1e-8
    towers.whole_batch(torch.randn(4, 4), forward, loss, scaler=scaler)
    towers.average()
    assert model.bias.grad.tolist() == pytest.approx([4e-8 * 2**16] * 2, rel=1e-3)


@pytest.mark.long
def test_a_step_with_a_forward_equals_whole_batch_and_the_optimizer():
    model = TwoEncoders(nn.Dropout(0.1), dtype=torch.float32)
    other = copy.deepcopy(model)
    step = Step(
        Towers(model, 4),
        info_nce,
        torch.optim.SGD(model.parameters(), lr=0.1),
        forward=lambda model, batch: model(batch),
    )
    towers, optimizer = Towers(other, 4), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        report = step(batch_of(12, torch.float32))
        expected = run(towers, batch_of(12, torch.float32), info_nce)
        optimizer.step()
        assert report.loss == expected.loss
    assert samestep.digest(model) == samestep.digest(other)


# ---- losses and memory -----------------------------------------------------------------------------


def test_the_report_has_one_loss():
    model = TwoEncoders()
    towers = Towers(model, 5)
    report = run(towers, batch_of(13), info_nce)
    assert (report.rows, report.count, report.step) == (13, 1.0, 0)
    assert report.tower_losses == [report.loss]
    for tower in towers(batch_of(13)):
        tower.backward(model(tower.batch)["left"].square().mean())
    assert towers.average().count == 13  # a loop after a whole batch counts rows again


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


class Activations:
    """Counts the bytes that autograd saves for backward, without the model's parameters."""

    def __init__(self, model):
        self.alive = self.most = 0
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor):
        kept = Kept(tensor.detach())  # an output that a node saves would keep the node
        if tensor.untyped_storage().data_ptr() not in self._own:
            self.alive += tensor.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(kept, self._drop, tensor.nbytes)
        return kept

    def _drop(self, size):
        self.alive -= size


@pytest.mark.long
@pytest.mark.parametrize("used", [0, 1])
def test_activations_of_one_tower_are_alive_at_a_time(used):
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))

    def forward(x):
        hidden = model[1](model[0](x))
        return hidden[:, :1], model[2:](hidden)  # the loss uses one output; the other's graph is freed, too

    def spread(outputs, batch):
        return outputs[used].std()

    most = {}
    for num_towers in (1, 2, 16):
        towers = Towers(model, num_towers)
        with Activations(model) as activations:
            towers.whole_batch(torch.randn(8 * num_towers, 4), forward, spread)
            assert activations.alive == 0
            towers.average()
        most[num_towers] = activations.most
    assert most[16] == most[2] == most[1]
    with Activations(model) as activations:  # a check of the counter itself
        parts = zip(*[forward(torch.randn(8, 4)) for _ in range(16)], strict=True)
        spread([torch.cat(part) for part in parts], None).backward()
    assert activations.most >= 16 * most[1]


# ---- batches of a loader ---------------------------------------------------------------------------


def local(batch, num_towers):
    rows = len(batch["left"])
    return LocalBatch(
        rows,
        {
            t: {k: v[r.start : r.stop].clone() for k, v in batch.items()}
            for t, r in enumerate(even_ranges(rows, num_towers))
            if r
        },
    )


def test_a_local_batch_gives_the_same_gradients_as_the_global_one():
    model, batch = TwoEncoders(nn.Dropout(0.2)), batch_of(11)
    digests = set()
    for given in (batch, local(batch, 4)):
        run(Towers(model, 4), given, info_nce)
        digests.add(samestep.digest({name: g for name, g in gradients(model).items() if g is not None}))
    assert len(digests) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda batch, out: batch["left"],
        lambda batch, out: batch.left,
        lambda batch, out: list(batch),
        lambda batch, out: len(batch),
        lambda batch, out: out["left"] - batch,
        lambda batch, out: F.mse_loss(out["left"], batch),
    ],
)
def test_a_loss_that_uses_the_rows_of_other_workers_is_an_error(use):
    towers = Towers(TwoEncoders(), 4)
    with pytest.raises(UsageError, match="return what the loss needs, such as labels, from forward"):
        towers.whole_batch(local(batch_of(8), 4), towers.model, lambda out, batch: use(batch, out))


# ---- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda out: out["left"].sum(), "a 0-dimensional tensor: expected dense tensors, rows first"),
        (lambda out: {"left": out["left"], "scale": 2.0}, "forward returned a float"),
        (lambda out: None, "forward returned a NoneType"),
        (lambda out: {}, "forward returned a dict without tensors"),
        (lambda out: out["left"].to_sparse(), "a tensor with the layout torch.sparse_coo"),
        (lambda out: collections.namedtuple("Local", "x")(out["left"]), "cannot be sent to other workers"),
    ],
)
def test_outputs_that_are_not_nested_tensors(forward, message):
    towers = Towers(TwoEncoders(), 4)
    with pytest.raises(UsageError, match=message):
        run(towers, batch_of(8), info_nce, lambda batch: forward(towers.model(batch)))


def test_outputs_of_two_towers_that_differ_in_more_than_rows():
    towers = Towers(TwoEncoders(), 3)
    calls = iter([4, 4, 3])
    with pytest.raises(
        UsageError,
        match=r"step 0: .* outputs for towers 0 and 2 \(tensor 0: float64 \[rows, 4\] on cpu, float64",
    ):
        run(towers, batch_of(6), info_nce, lambda batch: towers.model(batch)["left"][:, : next(calls)])


def test_a_forward_that_does_not_do_the_same_twice():
    towers = Towers(TwoEncoders(), 2)
    calls = iter([3, 3, 2, 2])
    with pytest.raises(
        UsageError,
        match=r"tower 0: forward returned float64 \[3, 4\] in the first pass and float64 \[2, 4\] in",
    ):
        towers.whole_batch(
            batch_of(6), lambda b: towers.model(b)["left"][: next(calls)], lambda out, _: out.std()
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out["left"].sum(0), r"has shape \(4,\), expected a scalar"),
        (lambda out: (out["left"].sum(), 3), "is a tuple, expected a scalar"),
        (lambda out: out["left"].detach().sum(), "does not require grad"),
    ],
)
def test_losses_that_are_not_a_scalar_that_requires_grad(loss, message):
    towers = Towers(TwoEncoders(), 4)
    with pytest.raises(UsageError, match=message):
        towers.whole_batch(batch_of(8), towers.model, lambda out, batch: loss(out))
    run(towers, batch_of(8), info_nce)  # no step is open


def test_errors_of_the_forward_and_the_loss_are_raised_unchanged():
    model = TwoEncoders(nn.BatchNorm1d(16))
    towers, before = Towers(model, 2), samestep.digest(model)
    states = torch.get_rng_state()
    for fails_at in range(1, 5):
        calls = iter(range(1, 9))

        def forward(batch, calls=calls, fails_at=fails_at):
            if next(calls) == fails_at:
                raise ZeroDivisionError("mine")
            return model(batch)

        with pytest.raises(ZeroDivisionError, match="mine"):
            run(towers, batch_of(6), info_nce, forward)
        assert torch.equal(torch.get_rng_state(), states)
        if fails_at < 3:  # the first pass
            assert samestep.digest(model) == before
    run(towers, batch_of(6), info_nce)


def test_a_step_that_was_not_averaged_is_abandoned_by_the_next():
    towers = Towers(TwoEncoders(), 2)
    towers.whole_batch(batch_of(6), towers.model, partial(info_nce, towers.model))
    with pytest.warns(UserWarning, match="step 0 is abandoned"):
        towers.whole_batch(batch_of(6), towers.model, partial(info_nce, towers.model))
    assert towers.average().step == 0
    assert towers.step == 1


def test_a_batch_that_cannot_be_cut():
    towers = Towers(TwoEncoders(), 2)
    batch = {**batch_of(6), "label": torch.arange(5)}
    with pytest.raises(BatchError, match=r"batch\['label'\] has 5 rows"):
        run(towers, batch, info_nce)
    run(towers, batch_of(6), info_nce)


class Queue(nn.Module):
    """A model whose loss counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(1))

    def loss(self, outputs, _):
        self.calls += 1
        return (outputs * self.calls).square().mean()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_step_that_is_abandoned_leaves_no_trace_of_the_loss(num_workers):
    def work(job):
        model = Queue()
        towers = Towers(model, 3, job=job)
        towers.whole_batch(torch.ones(6, 3), model.layer, model.loss)
        towers.abandon()
        after = model.calls.item()
        towers.whole_batch(torch.ones(6, 3), model.layer, model.loss)
        towers.average()
        return after, model.calls.item()

    assert values(work, num_workers) == [(0.0, 1.0)] * num_workers


def test_a_parameter_in_the_loss_may_have_gradients_of_another_dtype():
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    model.scale.grad_dtype = torch.float32
    towers = Towers(model, 3)
    batch = torch.ones(6, 3)
    towers.whole_batch(
        batch, lambda x: nn.functional.linear(x, model.weight), lambda y, _: (y * model.scale).mean()
    )
    towers.average()
    assert model.scale.grad.dtype == torch.float32
    torch.testing.assert_close(model.scale.grad[0], nn.functional.linear(batch, model.weight).mean())


def test_a_step_lets_go_of_its_functions():
    class Rows:
        pass

    towers, rows = Towers(nn.Linear(2, 1), 2), Rows()
    held = weakref.ref(rows)
    forward = lambda batch, rows=rows: towers.model(batch)  # noqa: E731
    towers.whole_batch(torch.ones(4, 2), forward, lambda outputs, batch: outputs.square().mean())
    towers.average()
    del rows, forward
    gc.collect()
    assert held() is None


def test_a_loss_that_runs_backward_itself():
    towers = Towers(TwoEncoders(), 4)

    def loss(out, batch):
        found = out["left"].square().sum()
        found.backward()
        return found

    with pytest.raises(
        UsageError, match=r"step 0: the graph of the loss of the whole batch is gone, as after"
    ):
        towers.whole_batch(batch_of(8), towers.model, loss)
    run(towers, batch_of(8), info_nce)  # no step is open
