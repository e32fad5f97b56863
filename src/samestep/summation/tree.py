"""The canonical tree: in which order contributions are added. Pure tensors, no processes.

Floating-point addition is not associative, so a sum has the same bits everywhere only if its
parentheses are the same everywhere. The parentheses here are those of the Merkle tree of RFC 6962
(section 2.1): a range of n leaves splits at the largest power of two below n. For seven towers:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

A contiguous run of leaves is then a handful of whole subtrees, which one worker can add by itself;
whoever holds the subtrees of all workers can finish the sum without knowing who made them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from samestep.errors import ConfigError
from samestep.summation import sparse

__all__ = [
    "Gradients",
    "TreeSum",
    "add_gradients",
    "average_gradients",
    "divide",
    "subtrees",
]

Value = TypeVar("Value")
Gradients = list[Tensor | None]
"""One gradient for each parameter, in the parameters' order; None where a tower used none."""


def siblings(left: range, right: range, num_leaves: int) -> bool:
    """Say whether two adjacent subtrees are the two children of one node of the tree.

    >>> siblings(range(4, 6), range(6, 7), num_leaves=7), siblings(range(4, 6), range(6, 7), num_leaves=8)
    (True, False)
    """
    width = 2 * len(left)
    return left.start % width == 0 and right.stop == min(left.start + width, num_leaves)


@dataclass
class TreeSum(Generic[Value]):
    """A running sum along the canonical tree, folded like a binary counter.

    Subtrees are pushed from left to right; two that are siblings are added at once. For K leaves from the
    first on, at most ⌈log2 K⌉ + 1 values are alive at a time, the one being pushed included; for K leaves
    from anywhere, 2·log2(K + 2) − 2.

    Args:
        num_leaves: leaves of the whole tree, T.
        add: `add(left, right)` returns the sum; it may work in place on `left`.

    Example:
        >>> total = TreeSum(3, add=lambda left, right: f"({left}+{right})")
        >>> for leaf in range(3):
        ...     total.push(range(leaf, leaf + 1), str(leaf))
        >>> total.root()
        '((0+1)+2)'
    """

    num_leaves: int
    add: Callable[[Value, Value], Value]
    nodes: list[tuple[range, Value]] = field(default_factory=list)

    def push(self, span: range, value: Value) -> None:
        """Add the subtree over the leaves in `span`, which must follow those pushed before."""
        assert not self.nodes or self.nodes[-1][0].stop == span.start
        while self.nodes and siblings(self.nodes[-1][0], span, self.num_leaves):
            left_span, left = self.nodes.pop()
            span, value = range(left_span.start, span.stop), self.add(left, value)
        self.nodes.append((span, value))

    def pop_sibling(self, span: range) -> tuple[range, Value] | None:
        """Take back the newest subtree if it is the left sibling of the one over `span`."""
        if self.nodes and siblings(self.nodes[-1][0], span, self.num_leaves):
            return self.nodes.pop()
        return None

    def root(self) -> Value:
        """Return the sum over all leaves."""
        assert [span for span, _ in self.nodes] == [range(self.num_leaves)]
        return self.nodes[0][1]


def subtrees(leaves: range, num_leaves: int) -> list[range]:
    """Return the whole subtrees that cover a contiguous range of leaves, from left to right.

    >>> subtrees(range(3, 7), num_leaves=7)
    [range(3, 4), range(4, 7)]
    """
    spans: TreeSum[None] = TreeSum(num_leaves, add=lambda left, right: None)
    for leaf in leaves:
        spans.push(range(leaf, leaf + 1), None)
    return [span for span, _ in spans.nodes]


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add two towers' gradients, in place on `left` where dense; an absent gradient adds nothing.

    Sparse gradients must be coalesced.
    """
    sums = [theirs if ours is None else ours for ours, theirs in zip(left, right, strict=True)]
    dense = []
    for position, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if ours is None or theirs is None:
            continue
        if ours.is_sparse or theirs.is_sparse:
            sums[position] = sparse.add(ours, theirs)
        else:
            dense.append((ours, theirs))
    if dense:
        torch._foreach_add_([ours for ours, _ in dense], [theirs for _, theirs in dense])
    return sums


def divide(total: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """Write `total / weight` to `out`, which may be `total`: the one division of a step.

    Half-precision sums are divided in float32, because a weight above 65,504 is no float16. The
    divisor is a tensor of the sum's own dtype, because CUDA turns division by a number on the host into
    multiplication by its rounded reciprocal. Division by 1 changes nothing and is left out, except on a
    GPU, which would have to be waited for to know.
    """
    if weight.device.type == "cpu" and float(weight) == 1.0:
        if out.data_ptr() != total.data_ptr():
            out.copy_(total)
    elif total.dtype in (torch.float16, torch.bfloat16):
        out.copy_(total.float().div_(weight.float()))
    else:
        torch.div(total, weight.to(total.dtype), out=out)


def average_gradients(
    tower_grads: Sequence[Iterable[tuple[Tensor | None, Tensor]]],
    weights: Sequence[float] | None = None,
) -> list[tuple[Tensor | None, Tensor]]:
    r"""Average the towers' gradients, parameter by parameter, in the order of the canonical tree.

    .. math:: g = \sum_t w_t g_t / \sum_t w_t

    Args:
        tower_grads: one entry for each tower, each a list of (gradient or None, parameter) with the
            parameters in the same order. Any shapes and floating dtypes.
        weights: how much each tower counts, at least 0 and not all 0; by default all the same.

    Returns:
        (averaged gradient, parameter) for each parameter of the first tower. The gradient is None
        where no tower had one; a tower without one counts as zero where others have it. It is sparse,
        and coalesced, where all towers' are sparse; a dense one among them makes it dense. The inputs are
        not changed.

    Raises:
        ConfigError: no towers, towers of different lengths or shapes, or weights that do not fit.

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
    """Return a scaled copy, so that adding in place leaves the caller's tensor alone."""
    return sparse.coalesced(sparse.coalesced(gradient.detach()) * scale)


def _check_towers(towers: list[list[tuple[Tensor | None, Tensor]]], weights: list[float]) -> None:
    if not towers:
        raise ConfigError("tower_grads is empty: expected one list of (gradient, parameter) a tower")
    if len(weights) != len(towers):
        raise ConfigError(f"weights has {len(weights)} entries for {len(towers)} towers: expected one each")
    if not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise ConfigError(f"weights = {weights}: expected none below 0 and a finite sum above 0")
    for index, pairs in enumerate(towers):
        if len(pairs) != len(towers[0]):
            raise ConfigError(
                f"tower {index} has {len(pairs)} gradients, tower 0 has {len(towers[0])}: expected as many"
            )
        for position, (gradient, _) in enumerate(pairs):
            expected = towers[0][position][1].shape
            if gradient is not None and gradient.shape != expected:
                raise ConfigError(
                    f"tower {index}, gradient {position} has shape {tuple(gradient.shape)}: "
                    f"expected its parameter's {tuple(expected)}"
                )
