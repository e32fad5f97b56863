r"""Convolutions with large kernels through Fourier transforms, for float32 on a CPU.

A 5×5 kernel costs 25 multiplications for each output, channel and channel; in the spectrum of a 16×16 tile,
a few. NNPACK, which comes with torch, computes so, and its sums are shorter and so closer to the exact ones
than those of the direct way. All three products of a training step are convolutions with stride 1,

.. math::
    y = x ⋆ w, \qquad \frac{\partial L}{\partial x} = g ⋆ \bar w^\top, \qquad
    \frac{\partial L}{\partial w} = (x^\top ⋆ g^\top)^\top

with ⋆ the sliding product, a bar for the kernel turned by 180° and ⊤ for rows and channels, or outputs and
inputs, exchanged. torch itself takes NNPACK for the first alone, and only where it has no oneDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["FourierConv2d"]

_TILE = 16
"""Side of NNPACK's largest tile, in pixels; a small picture is transformed at once in one of this size."""

_MIN_ROWS = 4
"""Below this, transforming the kernels costs more than it saves."""


class FourierConv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, more than twice as fast on a CPU for kernels of 5×5 and small pictures.

    It computes through Fourier transforms for float32 [rows ≥ 4, channels, height, width] on a CPU, where
    height and width with their padding are at most 16, stride and dilation are 1, and there is one group.
    Everything else is left to torch: other dtypes (autocast included), other devices, machines without
    NNPACK. Differentiable once. The bits do not depend on the number of threads.

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
            and torch.backends.nnpack.is_available()  # also wakes it: without, its products fail
        )


class _Convolve(torch.autograd.Function):
    """x, w, bias, padding -> x ⋆ w + bias."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, kernels: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        ctx.is_last = inputs.is_contiguous(memory_format=torch.channels_last)
        inputs = inputs.contiguous()  # NNPACK's order, which the backward pass wants again
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
    """Return the values with channels last in memory, or first."""
    return values.contiguous(memory_format=torch.channels_last) if is_last else values
