import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep import Step, Towers
from samestep.errors import ConfigError, NonFiniteError


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))


def batch_of(rows=12):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)), torch.arange(rows) % 3


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make(model, num_towers=4, loss_fn=loss_of, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Step(Towers(model, num_towers), loss_fn, optimizer, **settings)


def test_a_step_is_the_loop_and_the_optimizer():
    model = perceptron()
    other = copy.deepcopy(model)
    step, optimizer, towers = (
        make(model),
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        Towers(other, 4),
    )
    for _ in range(3):
        step(batch_of())
        for tower in towers(batch_of()):
            tower.backward(loss_of(other, tower.batch))
        towers.average()
        optimizer.step()
    assert samestep.digest(model) == samestep.digest(other)


def test_a_loss_may_be_a_sum_and_a_weight():
    model = perceptron()
    other = copy.deepcopy(model)

    def as_sum(model, batch):
        return samestep.LossSum(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    first, second = make(model)(batch_of()), make(other, loss_fn=as_sum)(batch_of())
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert second.count == 12


def test_clipping_acts_once_on_the_average():
    model = perceptron()
    report = make(model, clip_norm=0.01)(batch_of())
    assert report.grad_norm > 0.01
    clipped = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    assert clipped == pytest.approx(0.01, rel=1e-4)


def test_scheduler_and_average_move_once_a_step():
    model = perceptron()
    step = make(model)
    step.scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 2, 0.5)
    step.averaged_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(4):
        step(batch_of())
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
    assert step.averaged_model.n_averaged == 4


def poisoned(rows=12):
    pictures, labels = batch_of(rows)
    pictures[7] = math.inf
    return pictures, labels


def test_a_gradient_that_is_not_finite_stops_before_the_update():
    model = perceptron()
    before = samestep.digest(model)
    step = make(model)
    expected = (
        r"not finite \(tower 2, rows 6 to 8, loss nan, first in the gradient of 0.weight\); nothing was"
    )
    with pytest.raises(NonFiniteError, match=expected):
        step(poisoned())
    assert samestep.digest(model) == before


def test_or_is_skipped():
    model = perceptron()
    before = samestep.digest(model)
    step = make(model, on_nonfinite="skip")
    assert step(poisoned()).skipped
    assert samestep.digest(model) == before
    assert not step(batch_of()).skipped
    assert samestep.digest(model) != before


def test_float16_scales_the_loss_and_lowers_the_scale_when_it_overflows():
    model = perceptron()
    step = make(model, autocast=torch.float16)
    assert not step(batch_of()).skipped
    scale = step.scaler.get_scale()
    assert step(poisoned()).skipped
    assert step.scaler.get_scale() == scale / 2


def test_a_norm_that_overflows_is_skipped_by_the_scaler_too():
    model = perceptron()
    before = samestep.digest(model)
    step = make(model, loss_fn=lambda model, batch: model(batch[0]).mean() * 1e25)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    report = step(batch_of())
    assert (report.grad_norm, report.skipped) == (math.inf, True)
    assert samestep.digest(model) == before


def test_float16_with_sums_in_another_dtype_clips_what_is_unscaled():
    reports = []
    for accumulate_dtype in (None, torch.float64):
        model = perceptron()
        towers = Towers(model, 4, accumulate_dtype=accumulate_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reports.append(Step(towers, loss_of, optimizer, autocast=torch.float16, clip_norm=0.01)(batch_of()))
        clipped = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        assert clipped == pytest.approx(0.01, rel=1e-3)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_half_precision_near_the_full_one(dtype):
    seen = []
    model = perceptron()
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    report = make(model, autocast=dtype)(batch_of())
    assert seen == [dtype] * 4
    assert report.loss == pytest.approx(make(perceptron())(batch_of()).loss, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"autocast": torch.float64}, "autocast = torch.float64: expected"),
        ({"clip_norm": 0.0}, "clip_norm = 0.0: expected a number above 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite = 'ignore': expected 'raise' or 'skip'"),
    ],
)
def test_settings_that_do_not_exist(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(perceptron(), **settings)


def test_anything_with_a_step_may_be_a_scheduler():
    model, steps = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = SimpleNamespace(step=lambda: steps.append(1))
    Step(Towers(model, 2), lambda model, x: model(x).mean(), optimizer, scheduler=own)(torch.randn(4, 2))
    assert steps == [1]
    with pytest.raises(ConfigError, match=r"^scheduler is a object: expected one with step\(\)$"):
        Step(Towers(model, 2), lambda model, x: model(x).mean(), optimizer, scheduler=object())
