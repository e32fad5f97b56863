"""The canonical tree: the order in which gradients are added. Pure tensors, no processes.

Floating-point addition is not associative, so a sum has the same bits on all placements only if its
parentheses are the same. The parentheses here are those of the Merkle tree of RFC 6962 (section 2.1): a range
of n leaves splits at the largest power of two below n. For seven towers:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

A contiguous range of leaves consists of a few whole subtrees, which one worker can add by itself. A worker
that has the sums of all subtrees can finish the tree, whichever workers they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

__all__ = ["TreeSum", "join", "subtrees"]

Value = TypeVar("Value")


@dataclass
class TreeSum(Generic[Value]):
    """A running sum along the canonical tree of `num_leaves`, carried like a binary counter.

    Subtrees are pushed from left to right; two siblings are added at once. For K leaves that start at leaf 0,
    at most ⌈log2 K⌉ + 1 values are alive at a time, including the one being pushed; for K leaves that start
    anywhere, 2·log2(K + 2) − 2. `add(left, right)` may work in place on `left`.

    >>> total = TreeSum(3, add=lambda left, right: f"({left}+{right})")
    >>> total.push_leaves(range(3), ["0", "1", "2"])
    >>> total.nodes
    [(range(0, 3), '((0+1)+2)')]
    """

    num_leaves: int
    add: Callable[[Value, Value], Value]
    nodes: list[tuple[range, Value]] = field(default_factory=list)

    def push(self, span: range, value: Value) -> None:
        """Add the subtree over the leaves in `span`, which must follow the leaves pushed before."""
        assert not self.nodes or self.nodes[-1][0].stop == span.start
        while (sibling := self.pop_sibling(span)) is not None:
            left_span, left = sibling
            span, value = range(left_span.start, span.stop), self.add(left, value)
        self.nodes.append((span, value))

    def push_leaves(self, leaves: range, values: Iterable[Value]) -> None:
        """Add a value for each leaf."""
        for leaf, value in zip(leaves, values, strict=True):
            self.push(range(leaf, leaf + 1), value)

    def pop_sibling(self, span: range) -> tuple[range, Value] | None:
        """Remove and return the newest subtree if it and the subtree over `span` are siblings."""
        if not self.nodes:
            return None
        left = self.nodes[-1][0]
        width = 2 * len(left)
        are_siblings = left.start % width == 0 and span.stop == min(left.start + width, self.num_leaves)
        return self.nodes.pop() if are_siblings else None

    def root(self) -> Value:
        """Return the sum over all leaves."""
        assert [span for span, _ in self.nodes] == [range(self.num_leaves)]
        return self.nodes[0][1]


def join(
    spans: Iterable[Iterable[range]],
    sums: Iterable[Iterable[Value]],
    num_leaves: int,
    add: Callable[[Value, Value], Value],
) -> Value:
    """Finish the tree: add the sums of all workers' subtrees, given in order."""
    total = TreeSum(num_leaves, add=add)
    for span, value in zip(chain.from_iterable(spans), chain.from_iterable(sums), strict=True):
        total.push(span, value)
    return total.root()


def subtrees(leaves: range, num_leaves: int) -> list[range]:
    """Return the whole subtrees that cover a contiguous range of leaves, from left to right.

    >>> subtrees(range(3, 7), num_leaves=7)
    [range(3, 4), range(4, 7)]
    """
    spans: list[range] = []
    start = leaves.start
    while start < leaves.stop:
        width = start & -start or 1 << num_leaves.bit_length()  # the widest subtree that starts here
        while min(start + width, num_leaves) > leaves.stop:
            width //= 2
        spans.append(range(start, min(start + width, num_leaves)))
        start = spans[-1].stop
    return spans
