import copy

import pytest
import torch
from torch import nn

from samestep.recipes.cifar10.normalization import FastLocalResponseNorm

SETTINGS = {"size": 9, "alpha": 0.001, "beta": 0.75, "k": 1.0}
STRONG = {"size": 9, "alpha": 2.0, "beta": 0.75, "k": 1.0}


def inputs(channels=64, dtype=torch.float32, memory_format=torch.channels_last, scale=3.0):
    values = torch.randn(3, channels, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (scale * values).to(dtype).contiguous(memory_format=memory_format).requires_grad_()


def weights_of(y):
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)


def value_and_gradient(norm, x):
    x = x.detach().requires_grad_()
    y = norm(x)
    (y * weights_of(y)).sum().backward()
    return y.detach(), x.grad


def relative_error(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("channels", [1, 3, 9, 64])
@pytest.mark.parametrize(
    "settings",
    [SETTINGS, STRONG, {**STRONG, "size": 4}, {**STRONG, "size": 1}, {**STRONG, "beta": 0.6, "k": 2.0}],
    ids=["tutorial", "strong", "even", "alone", "other exponent"],
)
def test_it_is_what_torch_computes(settings, channels, dtype, tolerance, memory_format):
    x = inputs(channels, dtype, memory_format)
    got = value_and_gradient(FastLocalResponseNorm(**settings), x)
    expected = value_and_gradient(nn.LocalResponseNorm(**settings), x)
    for ours, torchs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, torchs) < tolerance


def test_the_gradient_is_the_derivative():
    norm = FastLocalResponseNorm(**STRONG)
    x = torch.randn(2, 12, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(norm, x.requires_grad_())
    assert torch.autograd.gradcheck(FastLocalResponseNorm(4, 2.0, 0.75, 1.0), x)


def test_a_second_derivative_is_refused():
    x = inputs(channels=4, dtype=torch.float64)
    (first,) = torch.autograd.grad(FastLocalResponseNorm(3)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_its_own_rounding(dtype):
    x = inputs(dtype=dtype)
    ours = value_and_gradient(FastLocalResponseNorm(**SETTINGS), x)
    exact = value_and_gradient(nn.LocalResponseNorm(**SETTINGS), x.double())
    for got, expected in zip(ours, exact, strict=True):
        assert got.dtype == dtype
        assert relative_error(got, expected) < 2 * torch.finfo(dtype).eps


def test_squares_beyond_float16_do_not_overflow():
    x = torch.full((1, 4, 1, 1), 1000.0, dtype=torch.float16)
    assert FastLocalResponseNorm(3)(x).isfinite().all()


@pytest.mark.parametrize("within", [False, True], ids=["after", "within"])
def test_autocast_changes_nothing(within):
    norm, x = FastLocalResponseNorm(**STRONG), inputs()
    expected = value_and_gradient(norm, x)
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
        if within:
            y.backward(weights_of(y))
    if not within:
        y.backward(weights_of(y))
    assert torch.equal(y, expected[0])
    assert torch.equal(x.grad, expected[1])


def test_it_gives_the_same_bits_again():
    norm, x = FastLocalResponseNorm(**STRONG), inputs()
    for first, second in zip(value_and_gradient(norm, x), value_and_gradient(norm, x), strict=True):
        assert torch.equal(first, second)


def test_the_memory_format_is_kept():
    norm = FastLocalResponseNorm(**SETTINGS)
    assert norm(inputs()).is_contiguous(memory_format=torch.channels_last)
    assert norm(inputs(memory_format=torch.contiguous_format)).is_contiguous()


def test_other_shapes_are_left_to_torch():
    x = torch.randn(2, 12, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(FastLocalResponseNorm(5)(x), nn.LocalResponseNorm(5)(x))


def test_it_has_no_state_and_can_be_copied():
    norm = FastLocalResponseNorm(**SETTINGS)
    norm(inputs())
    assert not norm.state_dict()
    assert repr(copy.deepcopy(norm)) == "FastLocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)"


def test_what_evaluation_filled_in_first_serves_training():
    norm = FastLocalResponseNorm(7, 0.3)
    with torch.inference_mode():
        norm(torch.randn(1, 5, 2, 2))
    x = inputs(channels=5)
    norm(x).sum().backward()
    assert x.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_the_same_on_a_gpu(dtype):
    norm, x = FastLocalResponseNorm(**STRONG), inputs(dtype=dtype)
    on_cpu, on_gpu = value_and_gradient(norm, x), value_and_gradient(norm, x.cuda())
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert relative_error(gpu.cpu(), cpu) < 4 * max(torch.finfo(dtype).eps, 1e-3)
