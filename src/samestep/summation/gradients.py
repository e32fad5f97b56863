"""Addition and division of dense, sparse or absent gradients. Pure tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from samestep.errors import ConfigError
from samestep.summation import sparse
from samestep.summation.tree import TreeSum, join

__all__ = [
    "Gradients",
    "add_gradients",
    "add_partial_sums",
    "average_gradients",
    "divide",
]

Gradients = list[Tensor | None]
"""One gradient for each parameter, in order; None for a parameter that was not used."""


def as_real(gradient: Tensor) -> Tensor:
    """Return a dense gradient with real and imaginary parts, if any, as a last dimension."""
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Convert a gradient to what `parameter.grad` accepts: complex if the parameter is, in `grad_dtype`."""
    if parameter.is_complex() and not gradient.is_complex():
        gradient = torch.view_as_complex(gradient)
    dtype = parameter.grad_dtype  # None allows any dtype
    return gradient if dtype is None or gradient.dtype == dtype else gradient.to(dtype)


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two towers' gradients, in place on dense ones in `left`; sparse ones must be coalesced."""
    sums: Gradients = []
    dense = []
    for ours, theirs in zip(left, right, strict=True):
        if ours is None or theirs is None:
            sums.append(theirs if ours is None else ours)
        elif ours.is_sparse or theirs.is_sparse:
            sums.append(sparse.add(ours, theirs))
        else:
            sums.append(ours)
            dense.append((ours, theirs))
    if dense:
        torch._foreach_add_([ours for ours, _ in dense], [theirs for _, theirs in dense])
    return sums


def add_partial_sums(
    spans: Sequence[Sequence[range]], partial_sums: Sequence[Sequence[Tensor]], own: int
) -> Tensor:
    """Finish the tree on all workers' partial sums, in place; the result is in worker `own`'s memory."""
    ours = {part.untyped_storage().data_ptr() for part in partial_sums[own]}

    def add(left: Tensor, right: Tensor) -> Tensor:
        return torch.add(left, right, out=right if right.untyped_storage().data_ptr() in ours else left)

    return join(spans, partial_sums, spans[-1][-1].stop, add)


def divide(total: Tensor, count: Tensor, *, out: Tensor) -> None:
    """Write `total / count` to `out`, which may be `total`. A step divides each sum only once, here.

    Half-precision sums are divided in float32, because float16 has no count above 65,504. The divisor is a
    tensor of the sum's dtype, because CUDA turns division by a number on the host into multiplication by its
    rounded reciprocal. Division by 1 is skipped, except on a GPU, where comparing the count would wait.
    """
    if count.device.type == "cpu" and float(count) == 1.0:
        if out.data_ptr() != total.data_ptr():
            out.copy_(total)
    elif total.dtype in (torch.float16, torch.bfloat16):
        out.copy_(total.float().div_(count.float()))
    else:
        torch.div(total, count.to(total.dtype), out=out)


def average_gradients(
    tower_grads: Sequence[Iterable[tuple[Tensor | None, Tensor]]],
    weights: Sequence[float] | None = None,
) -> list[tuple[Tensor | None, Tensor]]:
    r"""Average the towers' gradients, parameter by parameter, in the order of the canonical tree.

    .. math:: g = \sum_t w_t g_t / \sum_t w_t

    Args:
        tower_grads: for each tower a list of (gradient or None, parameter), with the parameters in the same
            order. Any shapes and floating dtypes.
        weights: the weight of each tower, at least 0 and not all 0; by default all are equal.

    Returns:
        (averaged gradient, parameter) for each parameter, in the dtype of the gradients. The average is None
        if no tower had a gradient; a single missing gradient counts as zero. It is sparse and coalesced if
        all towers' gradients are sparse, otherwise dense. The inputs are not changed.

    Raises:
        ConfigError: no towers, gradients of different numbers or shapes, or invalid weights.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> towers = [[(torch.tensor([1.0, 2.0]), weight)], [(torch.tensor([3.0, 6.0]), weight)]]
        >>> average_gradients(towers)[0][0]
        tensor([2., 4.])
    """
    towers = [list(pairs) for pairs in tower_grads]
    scales = [1.0] * len(towers) if weights is None else [float(weight) for weight in weights]
    _check_towers(towers, scales)
    total: TreeSum[Gradients] = TreeSum(len(towers), add=add_gradients)
    for tower, (pairs, scale) in enumerate(zip(towers, scales, strict=True)):
        total.push(range(tower, tower + 1), [None if g is None else _scaled(g, scale) for g, _ in pairs])
    sums = total.root()
    for gradient in sums:
        if gradient is not None:
            values = sparse.stored(gradient)
            divide(values, torch.tensor(sum(scales), dtype=torch.float64, device=values.device), out=values)
    return [(gradient, parameter) for gradient, (_, parameter) in zip(sums, towers[0], strict=True)]


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    """Return a scaled copy, so that adding in place does not change the caller's tensor."""
    return sparse.coalesced(sparse.coalesced(gradient.detach()) * scale)


def _check_towers(towers: list[list[tuple[Tensor | None, Tensor]]], weights: list[float]) -> None:
    if not towers:
        raise ConfigError("tower_grads is empty: expected a list of (gradient, parameter) for each tower")
    if len(weights) != len(towers):
        raise ConfigError(f"weights has {len(weights)} entries for {len(towers)} towers: expected one each")
    if not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise ConfigError(f"weights = {weights}: expected none below 0 and a finite sum above 0")
    for index, pairs in enumerate(towers):
        if len(pairs) != len(towers[0]):
            raise ConfigError(
                f"tower {index} has {len(pairs)} gradients, tower 0 has {len(towers[0])}: expected the same "
                "number"
            )
        for position, (gradient, _) in enumerate(pairs):
            expected = towers[0][position][1].shape
            if gradient is not None and gradient.shape != expected:
                raise ConfigError(
                    f"tower {index}, gradient {position} has shape {tuple(gradient.shape)}: "
                    f"expected its parameter's {tuple(expected)}"
                )
