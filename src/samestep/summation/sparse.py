"""Sparse gradients: which parameters get them, how to add two, and which tensors to send.

The sum of two gradients is sparse if both are, and dense if one is, as in autograd. So the layout and the
bits of a sum along the canonical tree depend only on the towers' gradients, not on their placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from samestep.arguments import check_kind
from samestep.errors import ConfigError
from samestep.summation.layout import Layout

__all__ = [
    "Size",
    "add",
    "coalesced",
    "empty",
    "find_sparse",
    "measure",
    "owned",
    "sparse_weights",
    "stored",
    "tensors_of",
]

Size = tuple[int, int]
"""(sparse dimensions, stored rows): (−1, 0) for no gradient; (0, 1) for a dense one, as a single row."""


def find_sparse(model: nn.Module, listed: Sequence[nn.Parameter]) -> list[str]:
    """Return the names of parameters that may get sparse gradients: listed ones and sparse embeddings'."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    check_kind("sparse_parameters", listed, Iterable, "a list of parameters")
    for position, parameter in enumerate(listed):
        if id(parameter) not in names:
            raise ConfigError(
                f"sparse_parameters[{position}] is not a parameter of {type(model).__name__} that requires "
                "grad: list parameters of the model itself"
            )
    found = {id(p) for p in listed} | sparse_weights(model)
    return [name for key, name in names.items() if key in found]


def sparse_weights(model: nn.Module) -> set[int]:
    """Return the ids of the weights of sparse embeddings, including frozen ones."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    return {id(m._parameters.get("weight")) for m in embeddings}


def coalesced(gradient: Tensor) -> Tensor:
    """Return a gradient, coalesced if it is sparse."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def owned(gradient: Tensor) -> Tensor:
    """Return a gradient from backward, coalesced and contiguous, in memory that can be written in place.

    Autograd may store the sparse tensor that a backward function returned, without a copy. It also keeps a
    dense gradient's strides, which other workers do not know and which affect the bits of its norm.
    """
    if not gradient.is_sparse:
        return gradient.contiguous()
    return gradient.clone() if gradient.is_coalesced() else gradient.coalesce()


def stored(gradient: Tensor) -> Tensor:
    """Return a view of the values that a gradient stores; a dense gradient itself."""
    return gradient._values() if gradient.is_sparse else gradient


def add(left: Tensor, right: Tensor) -> Tensor:
    """Add two gradients; sparse ones must be coalesced. A dense `left` is changed in place."""
    if not left.is_sparse:
        return left.add_(right)
    if not right.is_sparse:  # torch adds only sparse to dense, not dense to sparse
        return right.clone().add_(left)
    if left.sparse_dim() != right.sparse_dim():  # such as an embedding's and a gather's
        return left.to_dense().add_(right)
    # Not `left + right`: it starts from +0.0, which turns a −0.0 in one of them into +0.0.
    indices = torch.cat([left.indices(), right.indices()], dim=1)
    values = torch.cat([left.values(), right.values()])
    return _unchecked(indices, values, left.shape, is_coalesced=False).coalesce()


def measure(gradient: Tensor | None) -> Size:
    """Return the `Size` of a gradient, from which `empty` makes memory for it."""
    if gradient is None:
        return -1, 0
    return (gradient.sparse_dim(), gradient._nnz()) if gradient.is_sparse else (0, 1)


def empty(layout: Layout, size: Size, device: torch.device) -> Tensor | None:
    """Return memory for a gradient of this size; fill the tensors that `tensors_of` returns for it."""
    dims, rows = size
    if dims < 0:
        return None
    values = torch.empty(rows, *layout.shape[dims:], dtype=layout.dtype, device=device)
    if dims == 0:
        return values[0]
    indices = torch.empty(dims, rows, dtype=torch.int64, device=device)
    return _unchecked(indices, values, layout.shape, is_coalesced=True)


def _unchecked(indices: Tensor, values: Tensor, shape: tuple[int, ...], *, is_coalesced: bool) -> Tensor:
    # torch 2.11 and 2.12 warn about `check_invariants=False`: https://github.com/pytorch/pytorch/pull/183256
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, device=values.device
        )


def tensors_of(gradient: Tensor | None) -> list[Tensor]:
    """Return the tensors of a gradient as flat tensors; views if it comes from `empty`."""
    if gradient is None:
        return []
    parts = [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]
    # A tensor of one element is contiguous whatever its strides, and `view(-1)` may keep an odd stride.
    return [part.contiguous().as_strided((part.numel(),), (1,)) for part in parts]
