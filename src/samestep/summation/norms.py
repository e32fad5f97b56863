"""2-norms of gradients, the same bits wherever they are taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.summation.sparse import coalesced, stored

__all__ = ["norms_of", "squared_sum"]

_PIECE = 2**20
"""Elements whose norm is taken at once: float32 sums of many more lose digits."""


def norms_of(gradient: Tensor) -> list[Tensor]:
    """Return the 2-norms of the pieces of a gradient, 0-dim, float32 or wider; sparse ones as they are."""
    values = stored(coalesced(gradient))
    dtype = torch.promote_types(values.dtype, torch.float32)
    return [torch.linalg.vector_norm(piece, dtype=dtype) for piece in values.reshape(-1).split(_PIECE)]


def squared_sum(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of norms, float64 0-dim; 0 without any."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()
