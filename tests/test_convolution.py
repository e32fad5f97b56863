import pytest
import torch
from torch import nn

from samestep.recipes.cifar10.convolution import FourierConv2d

SHAPES = {
    "same size": ((6, 5, 12, 12), 4, 5, 2),
    "odd sides": ((4, 3, 9, 11), 7, 5, 1),
    "no padding": ((5, 2, 16, 10), 3, 3, 0),
    "wide": ((4, 2, 7, 7), 3, (3, 7), (1, 3)),
    "largest": ((4, 2, 14, 13), 1, 9, 2),
    "one output": ((4, 2, 5, 5), 3, 5, 0),
}


def layers(channels, outputs, kernel, padding, *, bias=True):
    torch.manual_seed(0)
    ours = FourierConv2d(channels, outputs, kernel, padding=padding, bias=bias)
    theirs = nn.Conv2d(channels, outputs, kernel, padding=padding, bias=bias).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def value_and_gradients(layer, pictures):
    pictures = pictures.detach().requires_grad_()
    value = layer(pictures)
    value.backward(torch.linspace(-1, 2, value.numel(), dtype=value.dtype).reshape(value.shape))
    return [value.detach(), pictures.grad, *(p.grad for p in layer.parameters())]


def is_fast(value):
    return "_Convolve" in type(value.grad_fn).__name__


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_convolution_and_its_gradients(shape, bias, memory_format):
    size, outputs, kernel, padding = SHAPES[shape]
    ours, theirs = layers(size[1], outputs, kernel, padding, bias=bias)
    pictures = torch.randn(size).contiguous(memory_format=memory_format)
    assert is_fast(ours(pictures))
    got = value_and_gradients(ours, pictures)
    expected = value_and_gradients(theirs, pictures.double())
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()
    assert got[0].is_contiguous(memory_format=memory_format)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    layer, _ = layers(8, 8, 5, 2)
    pictures = torch.randn(7, 8, 12, 12)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            layer.zero_grad()
            found.append(value_and_gradients(layer, pictures))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (FourierConv2d(3, 4, 5, padding=2), (3, 3, 12, 12)),
        (FourierConv2d(3, 4, 5, padding=2), (3, 12, 12)),
        (FourierConv2d(3, 4, 5, padding=2), (4, 3, 15, 12)),
        (FourierConv2d(3, 4, 5, padding=2, stride=2), (4, 3, 12, 12)),
        (FourierConv2d(3, 4, 5, padding=2, dilation=2), (4, 3, 12, 12)),
        (FourierConv2d(4, 4, 5, padding=2, groups=2), (4, 4, 12, 12)),
        (FourierConv2d(3, 4, 5, padding=2, padding_mode="reflect"), (4, 3, 12, 12)),
        (FourierConv2d(3, 4, 5, padding="same"), (4, 3, 12, 12)),
        (FourierConv2d(3, 4, 1, padding=1), (4, 3, 12, 12)),
        (FourierConv2d(3, 4, 5, padding=2, dtype=torch.float64), (4, 3, 12, 12)),
    ],
    ids=lambda value: str(value),
)
def test_the_rest_is_left_to_torch(layer, size):
    pictures = torch.randn(size, dtype=layer.weight.dtype)
    value = layer(pictures)
    assert not is_fast(value)
    assert torch.equal(value, nn.Conv2d.forward(layer, pictures))


def test_a_kernel_larger_than_the_picture_gets_torch_s_error():
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        FourierConv2d(3, 4, 5)(torch.randn(4, 3, 12, 4))


def test_autocast_is_left_to_torch():
    layer = FourierConv2d(3, 4, 5, padding=2)
    with torch.autocast("cpu", torch.bfloat16):
        value = layer(torch.randn(4, 3, 12, 12))
    assert value.dtype == torch.bfloat16
    assert not is_fast(value)


def test_nothing_is_computed_for_what_needs_no_gradient():
    layer = FourierConv2d(3, 4, 5, padding=2)
    layer.weight.requires_grad_(False)
    layer(torch.randn(4, 3, 12, 12)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
