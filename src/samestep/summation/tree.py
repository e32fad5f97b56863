"""The canonical tree: in which order contributions are added. Pure tensors, no processes.

Floating-point addition is not associative, so a sum has the same bits everywhere only if its
parentheses are the same everywhere. The parentheses here are those of the Merkle tree of RFC 6962
(section 2.1): a range of n leaves splits at the largest power of two below n. For seven towers:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

A contiguous run of leaves is then a handful of whole subtrees, which one worker can add by itself;
whoever holds the subtrees of all workers can finish the sum without knowing who made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["TreeSum", "subtrees"]

Value = TypeVar("Value")


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
