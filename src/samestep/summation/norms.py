"""2-norms of gradients, taken of fixed blocks, so that it is all the same who has which. Pure tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from samestep.summation import sparse

__all__ = ["NORM_BLOCK", "block_norms", "norms_of", "squared_sum", "total_norm"]

NORM_BLOCK = 2**20
"""Elements: float32 sums of many more lose digits."""


def norms_of(gradient: Tensor) -> list[Tensor]:
    """Return the norms of a gradient's blocks, 0-dim, float32 or wider, in the order of its memory."""
    return block_norms([gradient])[0]


def block_norms(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the norms of each gradient's blocks; see `norms_of`."""
    blocks = [[*map(_wide, _flat(gradient).split(NORM_BLOCK))] for gradient in gradients]
    together = [*chain.from_iterable(blocks)]
    norms = iter(torch._foreach_norm(together) if together else ())
    return [list(islice(norms, len(own))) for own in blocks]


def _flat(gradient: Tensor) -> Tensor:
    values = sparse.stored(sparse.coalesced(gradient))
    if values.is_contiguous():
        return values.view(-1)
    if values.stride() == torch.empty_like(values, device="meta").stride():
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _wide(block: Tensor) -> Tensor:
    """Return a block in a precision in which a norm has more than two or three digits."""
    return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block


def total_norm(norms: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return the norm of all gradients together, 0-dim, given those of each one's blocks; 0 without any."""
    each = [own[0] if len(own) == 1 else _norm(own) for own in norms]
    return _norm(each) if each else torch.tensor(0.0)


def _norm(norms: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def squared_sum(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of norms, float64 0-dim; 0 without any."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()
