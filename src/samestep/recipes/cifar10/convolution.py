r"""Convolutions with large kernels by Fourier transforms, for float32 on a CPU.

Per output and pair of channels, a 5×5 kernel takes 25 multiplications; in the spectrum of a 16×16 tile, it
takes a few. NNPACK, a part of torch, works this way. Its sums have fewer terms than a direct convolution's,
so rounding errors are smaller. All three products of a training step are convolutions with stride 1,

.. math::
    y = x ⋆ w, \qquad \frac{\partial L}{\partial x} = g ⋆ \bar w^\top, \qquad
    \frac{\partial L}{\partial w} = (x^\top ⋆ g^\top)^\top

where ⋆ is the cross-correlation, a bar rotates the kernel by 180°, and ⊤ swaps rows and channels, or output
and input channels. torch itself uses NNPACK for the first product only, and only without oneDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["FourierConv2d"]

_TILE = 16
"""Side of NNPACK's largest tile, in pixels; a picture that fits needs only one transform."""

_MIN_ROWS = 4
"""With fewer rows, transforming the kernels costs more than it saves."""


class FourierConv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, more than twice as fast on a CPU for kernels of 5×5 and small pictures.

    It uses Fourier transforms for float32 [rows ≥ 4, channels, height, width] on a CPU, if height and width
    with padding are at most 16, stride and dilation are 1, and there is one group. Everything else is left to
    torch: other dtypes (also under autocast), other devices, machines without NNPACK. Differentiable once.
    The bits do not depend on the number of threads.

    Example:
        >>> convolution = FourierConv2d(3, 8, 5, padding=2)
        >>> pictures = torch.randn(4, 3, 12, 12)
        >>> torch.allclose(convolution(pictures), nn.Conv2d.forward(convolution, pictures), atol=1e-5)
        True

    References:
        Mathieu, Henaff & LeCun, "Fast training of convolutional networks through FFTs", ICLR 2014.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve [rows, channels, height, width]."""
        if not self._fits(input):
            return super().forward(input)
        assert isinstance(self.padding, tuple)
        outputs: Tensor = _Convolve.apply(input, self.weight, self.bias, self.padding)  # type: ignore[no-untyped-call]
        return outputs

    def _fits(self, pictures: Tensor) -> bool:
        is_plain = (*self.stride, *self.dilation, self.groups) == (1, 1, 1, 1, 1)
        return (
            is_plain
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
            and pictures.dim() == 4
            and len(pictures) >= _MIN_ROWS
            and all(s + 2 * p <= _TILE for s, p in zip(pictures.shape[2:], self.padding, strict=True))
            and all(p < k for p, k in zip(self.padding, self.kernel_size, strict=True))
            and pictures.device.type == self.weight.device.type == "cpu"
            and pictures.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.nnpack.is_available()  # also initializes NNPACK, or its products fail
        )


class _Convolve(torch.autograd.Function):
    """x, w, bias, padding -> x ⋆ w + bias."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, kernels: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        ctx.is_last = inputs.is_contiguous(memory_format=torch.channels_last)
        inputs = inputs.contiguous()  # NNPACK needs this layout, in the backward pass too
        ctx.save_for_backward(inputs, kernels)
        ctx.padding = padding
        return _arrange(_slide(inputs, kernels, padding, bias), ctx.is_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, kernels = ctx.saved_tensors
        gradient = gradient.contiguous()
        to_inputs = to_kernels = to_bias = None
        if ctx.needs_input_grad[0]:
            turned = kernels.flip(2, 3).transpose(0, 1)
            rest = tuple(k - 1 - p for k, p in zip(kernels.shape[2:], ctx.padding, strict=True))
            to_inputs = _arrange(_slide(gradient, turned, rest), ctx.is_last)
        if ctx.needs_input_grad[1]:
            to_kernels = _slide(inputs.transpose(0, 1), gradient.transpose(0, 1), ctx.padding).transpose(0, 1)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum((0, 2, 3))
        return to_inputs, to_kernels, to_bias, None


def _slide(inputs: Tensor, kernels: Tensor, padding: tuple[int, ...], bias: Tensor | None = None) -> Tensor:
    """Return inputs ⋆ kernels + bias."""
    outputs: Tensor = torch.ops.aten._nnpack_spatial_convolution(inputs, kernels, bias, padding)
    return outputs


def _arrange(values: Tensor, is_last: bool) -> Tensor:
    """Return the values in channels-last memory format if `is_last`, else unchanged."""
    return values.contiguous(memory_format=torch.channels_last) if is_last else values
