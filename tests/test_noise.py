"""The norms of towers' gradients and the noise scale, against what they are by definition."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Step, Towers
from samestep.errors import ConfigError
from samestep.summation.norms import norms_of, squared_sum
from samestep.summation.placement import even_ranges
from samestep.towers.noise import GradientNorms, NoiseScale

from .nets import sparse_tensor


def perceptron(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch_of(rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 5, generator=generator, dtype=dtype), torch.arange(rows) % 3


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def run(towers, batch):
    for tower in towers(batch):
        tower.backward(loss_of(towers.model, tower.batch))
    return towers.average()


def square_of(model, loss):
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return sum(float(g.double().square().sum()) for g in gradients)


@pytest.mark.parametrize(("num_towers", "rows"), [(1, 6), (2, 7), (7, 23), (8, 32), (5, 3)])
def test_norms_are_those_of_each_towers_mean_gradient(num_towers, rows):
    model, batch = perceptron(), batch_of(rows)
    report = run(Towers(model, num_towers, noise_every=1), batch)
    if num_towers == 1:
        assert report.tower_grad_norms is None
        assert report.noise_scale is None
        return
    for found, part in zip(report.tower_grad_norms, even_ranges(rows, num_towers), strict=True):
        if not part:
            assert math.isnan(found)
            continue
        own = slice(part.start, part.stop)
        expected = square_of(model, loss_of(model, (batch[0][own], batch[1][own])))
        assert found**2 == pytest.approx(expected, rel=1e-12)


def test_the_noise_scale_of_equal_towers_is_the_papers():
    model, batch = perceptron(), batch_of(32)
    report = run(Towers(model, 8, noise_every=1), batch)
    small = sum(norm**2 for norm in report.tower_grad_norms) / 8
    big = report.grad_norm**2
    signal = (32 * big - 4 * small) / (32 - 4)
    noise = (small - big) / (1 / 4 - 1 / 32)
    assert report.noise_scale == pytest.approx(noise / signal if signal > 0 else math.inf, rel=1e-9)


@pytest.mark.long
def test_uneven_towers_with_weights_are_without_bias():
    """Rows draw a gradient with known mean and covariance, and weigh it by how much they count."""
    ranges, num_trials = [range(0, 5), range(5, 6), range(6, 9), range(9, 20)], 20_000
    mean = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64)
    counts = torch.tensor([4.0, 6.0, 5.0] * 7, dtype=torch.float64)[:20]
    # A row's gradient is what its count makes of the mean one, and noise of covariance 25·I.
    generator = torch.Generator().manual_seed(0)
    noise = 5 * torch.randn(num_trials, 20, 3, generator=generator, dtype=torch.float64)
    sums = counts[:, None] * mean + noise
    weights = [float(counts[list(part)].sum()) for part in ranges]
    towers = [sums[:, list(part)].sum(1) / weight for part, weight in zip(ranges, weights, strict=True)]
    squares = torch.stack([g.square().sum(1) for g in towers], dim=1).tolist()
    averages = (sums.sum(1) / sum(weights)).square().sum(1).tolist()
    sizes = [len(part) for part in ranges]
    found = torch.tensor(
        [
            GradientNorms(own, weights, sizes, average).estimate()
            for own, average in zip(squares, averages, strict=True)
        ]
    )
    signal, spread = found.mean(0).tolist()
    assert signal == pytest.approx(float(mean.square().sum()), rel=0.03)
    assert spread == pytest.approx(3 * 25 * (20 / sum(weights)) ** 2, rel=0.03)


def test_one_tower_with_weight_tells_nothing():
    assert GradientNorms([1.0, math.nan], [3.0, 0.0], [3, 0], 1.0).estimate() is None
    assert GradientNorms([1.0, math.nan, 2.0], [3.0, 0.0, 1.0], [3, 0, 1], 1.0).estimate() is not None


def test_it_is_measured_at_every_nth_step():
    towers, seen = Towers(perceptron(), 4, noise_every=3), []
    for _ in range(7):
        report = run(towers, batch_of(24))
        seen.append((report.tower_grad_norms is not None, report.noise_scale))
    assert [measured for measured, _ in seen] == [True, False, False, True, False, False, True]
    assert all(scale is not None for _, scale in seen)
    assert towers.noise.num_measured == 3


def test_or_never():
    report = run(Towers(perceptron(), 4, noise_every=0), batch_of(24))
    assert (report.tower_grad_norms, report.noise_scale) == (None, None)


@pytest.mark.parametrize("noise_every", [-1, 0.5, True, None])
def test_settings_that_do_not_exist(noise_every):
    with pytest.raises(ConfigError, match=f"noise_every = {noise_every!r}: expected an int >= 0"):
        Towers(perceptron(), 4, noise_every=noise_every)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_towers", [3, 8, 13])
def test_bits_are_the_same_with_and_without(num_towers, dtype):
    """Folding by hand adds as autograd does when it accumulates."""
    digests = set()
    for noise_every in (0, 1, 2):
        model = perceptron(dtype)
        towers = Towers(model, num_towers, noise_every=noise_every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for rows in (31, 12, 40):
            run(towers, batch_of(rows, dtype))
            optimizer.step()
        digests.add(samestep.digest(model))
    assert len(digests) == 1


@pytest.mark.long
def test_float16_norms_are_without_the_loss_scale():
    reports = []
    for autocast in (torch.float16, None):
        model = perceptron(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = Step(Towers(model, 4, noise_every=1), loss_of, optimizer, autocast=autocast)
        reports.append(step(batch_of(24, torch.float32)))
    assert reports[0].tower_grad_norms == pytest.approx(reports[1].tower_grad_norms, rel=0.02)
    assert reports[0].noise_scale == pytest.approx(reports[1].noise_scale, rel=0.1)


def test_steps_that_are_not_finite_are_left_out():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(Towers(model, 4, noise_every=1), loss_of, optimizer, on_nonfinite="skip")
    before = step(batch_of(24)).noise_scale
    inputs, labels = batch_of(24)
    inputs[7] = math.nan
    report = step((inputs, labels))
    assert report.skipped
    assert [math.isnan(norm) for norm in report.tower_grad_norms] == [False, True, False, False]
    assert report.noise_scale == before


def test_what_is_smoothed_are_both_estimates_not_their_ratio():
    scale = NoiseScale()
    assert scale.value is None
    for small, big in ((3.0, 2.0), (5.0, 2.5)):
        scale.measure(GradientNorms([small] * 4, [2.0] * 4, [2] * 4, big))
    # Batches of 2 and 8: |G|² = (8·big − 2·small) / 6, tr Σ = (small − big) / (1/2 − 1/8).
    signals, noises = ((10 / 6, 10 / 6), (1 / 0.375, 2.5 / 0.375))
    expected = (0.9 * noises[0] + noises[1]) / (0.9 * signals[0] + signals[1])
    assert scale.value == pytest.approx(expected)


def test_noise_that_hides_the_gradient_is_infinite():
    scale = NoiseScale()
    scale.measure(GradientNorms([5.0, 5.0], [1.0, 1.0], [1, 1], 2.0))
    assert scale.value == math.inf


def test_state_goes_through_json_and_on():
    scale, other = NoiseScale(), NoiseScale()
    scale.measure(GradientNorms([3.0, 4.0], [2.0, 1.0], [2, 1], 3.0))
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for each in (scale, other):
        each.measure(GradientNorms([3.5, 4.0], [2.0, 1.0], [2, 1], 3.2))
    assert other.value == scale.value
    assert other.num_measured == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_large_and_of_half_precision_gradients(dtype):
    gradient = torch.randn(3, 1_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = float(gradient.double().square().sum())
    found = float(squared_sum(norms_of(gradient), gradient.device))
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(norms_of(gradient)) == 3


def test_norms_of_sparse_gradients_count_an_index_once():
    gradient = sparse_tensor([1, 1, 4], torch.tensor([3.0, 1.0, 2.0]), (9,))
    assert float(squared_sum(norms_of(gradient), gradient.device)) == pytest.approx(20)
