r"""Convolutions with large kernels as products of spectra, for float32 on a CPU.

Per pair of channels, a 5×5 kernel with a padding of 2 takes 3,600 multiplications for a picture of 12×12. In
the discrete Fourier transform with a period of 14×14, it takes 400, four per pair of conjugate frequencies:

.. math:: y_o = \sum_k w_k x_{o + k - p}
    = \frac{1}{n} \sum_f e^{i f \cdot o} \sum_k w_k e^{i f \cdot (k - p)} \sum_s x_s e^{-i f \cdot s}

where p is the padding and n counts frequencies. The period is the picture's side plus p: what a kernel reads
before one edge are the zeros behind the other. Pictures are small, so each of the three sums is a product
with a matrix of cosines and sines; here that is faster than `torch.fft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["FourierConv2d"]

_LARGEST = 16
"""Largest side of a picture with its padding, in pixels; the matrices grow with its fourth power."""

_MIN_ROWS = 4
"""With fewer rows, transforming the kernels costs more than it saves."""


class FourierConv2d(nn.Conv2d):
    """`torch.nn.Conv2d`, faster on a CPU for kernels of 5×5, small pictures and many channels.

    It multiplies spectra for float32 [rows ≥ 4, channels, height, width] on a CPU, if height and width with
    the padding of one side are at most 16, stride and dilation are 1, and there is one group. Everything else
    is left to torch: other dtypes (also under autocast) and other devices. Differentiable once.

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
            and all(
                s + p <= _LARGEST and p < k <= s + 2 * p
                for s, k, p in zip(pictures.shape[2:], self.kernel_size, self.padding, strict=True)
            )
            and pictures.device.type == self.weight.device.type == "cpu"
            and pictures.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )


class _Convolve(torch.autograd.Function):
    """x, w, bias, padding -> x ⋆ w + bias, in the memory format of x."""

    @staticmethod
    def forward(
        ctx: Any, pictures: Tensor, kernels: Tensor, bias: Tensor | None, padding: tuple[int, ...]
    ) -> Tensor:
        tables = _tables(tuple(pictures.shape[2:]), tuple(kernels.shape[2:]), padding)
        is_last = pictures.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if is_last else torch.contiguous_format
        spectra = _transform(tables.of_pixels, pictures)
        weights = _transform(tables.of_taps, kernels.transpose(0, 1))
        ctx.save_for_backward(spectra, weights)
        ctx.tables = tables
        outputs = _restore(tables.to_pixels, _multiply(spectra, weights), tables.output)
        outputs = outputs.contiguous(memory_format=ctx.memory_format)
        return outputs if bias is None else outputs.add_(bias[:, None, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        spectra, weights = ctx.saved_tensors
        tables = ctx.tables
        to_pictures = to_kernels = to_bias = None
        products = _transform(tables.to_pixels.T, gradient)
        if ctx.needs_input_grad[0]:
            to_spectra = _multiply(products, weights.transpose(2, 3), second=-1)
            to_pictures = _restore(tables.of_pixels.T, to_spectra, tables.picture)
            to_pictures = to_pictures.contiguous(memory_format=ctx.memory_format)
        if ctx.needs_input_grad[1]:
            to_weights = _multiply(spectra.transpose(2, 3), products, first=-1)
            to_kernels = _restore(tables.of_taps.T, to_weights, tables.kernel).transpose(0, 1)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum((0, 2, 3))
        return to_pictures, to_kernels, to_bias, None


def _transform(table: Tensor, images: Tensor) -> Tensor:
    """Return the sums of [a, b, height, width], by a table [2f, height · width]: [2, f, a, b]."""
    a, b = images.shape[:2]
    return (table @ images.permute(2, 3, 0, 1).reshape(-1, a * b)).view(2, -1, a, b)


def _restore(table: Tensor, sums: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return the images of sums [2, f, a, b], by a table [height · width, 2f]: [a, b, height, width]."""
    a, b = sums.shape[2:]
    return (table @ sums.view(-1, a * b)).view(*size, a, b).permute(2, 3, 0, 1)


def _multiply(a: Tensor, b: Tensor, first: int = 1, second: int = 1) -> Tensor:
    """Multiply f complex matrices, [2, f, n, m] by [2, f, m, l]; -1 conjugates the first or the second."""
    result = a.new_empty(2, a.shape[1], a.shape[2], b.shape[3])
    torch.bmm(a[0], b[0], out=result[0])
    result[0].baddbmm_(a[1], b[1], alpha=-first * second)
    torch.bmm(a[1], b[0], out=result[1])
    result[1].baddbmm_(a[0], b[1], beta=first, alpha=second)
    return result


class _Tables(NamedTuple):
    """Cosines and sines of f frequencies, one of each pair of complex conjugates; real parts come first."""

    of_pixels: Tensor
    """[2f, pixels of the picture]"""

    of_taps: Tensor
    """[2f, taps of the kernel]"""

    to_pixels: Tensor
    """[pixels of the output, 2f]"""

    picture: tuple[int, ...]
    """Height and width of the picture."""

    kernel: tuple[int, ...]
    """Those of the kernel."""

    output: tuple[int, ...]
    """Those of the output."""


@cache
def _tables(picture: tuple[int, ...], kernel: tuple[int, ...], padding: tuple[int, ...]) -> _Tables:
    period = torch.tensor([s + p for s, p in zip(picture, padding, strict=True)])
    output = tuple(s + 2 * p - k + 1 for s, p, k in zip(picture, padding, kernel, strict=True))
    frequencies, weights = _frequencies(period)

    def waves(sides: tuple[int, ...], offset: tuple[int, ...] = (0, 0)) -> tuple[Tensor, Tensor]:
        angles = 2 * pi * frequencies / period @ (_grid(sides) - torch.tensor(offset)).double().T
        return angles.cos(), angles.sin()

    of_pixels, of_taps, to_pixels = waves(picture), waves(kernel, padding), waves(output)
    return _Tables(
        torch.cat((of_pixels[0], -of_pixels[1])).float(),
        torch.cat(of_taps).float(),
        torch.cat((weights * to_pixels[0], -weights * to_pixels[1])).T.float().contiguous(),
        picture,
        kernel,
        output,
    )


def _frequencies(period: Tensor) -> tuple[Tensor, Tensor]:
    """Return f, [frequencies, 2], and how much each counts in the inverse transform, [frequencies, 1]."""
    grid = _grid(period.tolist())
    conjugates = -grid % period
    places, others = (each @ torch.tensor([int(period[1]), 1]) for each in (grid, conjugates))
    kept = places <= others
    weights = torch.where(places == others, 1.0, 2.0).double() / len(grid)
    return grid[kept].double(), weights[kept, None]


def _grid(sides: Sequence[int]) -> Tensor:
    """Return the points of a rectangle, [height · width, 2]."""
    return torch.cartesian_prod(*(torch.arange(side) for side in sides))
