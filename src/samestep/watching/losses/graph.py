"""Walks through the autograd graph of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["graph_of"]


def graph_of(losses: Iterable[Tensor], goes_on: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield the nodes of the losses' graph; those of leaves have an attribute `variable`.

    The walk goes on behind a node where `goes_on` says so.
    """
    nodes: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if goes_on(node):
                nodes.extend(each for each, _ in node.next_functions)
