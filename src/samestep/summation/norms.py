"""2-norms of gradients over fixed blocks of elements, whose bits do not depend on which worker has which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from samestep.summation import sparse
from samestep.summation.buckets import Average, Piece
from samestep.summation.layout import in_order, is_dense
from samestep.summation.plan import Plan
from samestep.workers.collectives import gather_rows
from samestep.workers.job import Job

__all__ = ["NORM_BLOCK", "Norms", "gather_norms", "norms_of", "squared_sum", "total_norm"]

NORM_BLOCK = 2**20
"""Number of elements in a block; a float32 sum over many more loses digits."""

Norms = Sequence[Tensor]
"""The norms of a gradient's blocks, in memory order, each 0-dim, float32 or wider."""

_Place = tuple[int, int]
"""A parameter's index, and the first element of a piece of its gradient."""

_ABSENT = -1.0
"""Stands for the norm of an absent gradient in a message."""


def norms_of(gradient: Tensor) -> Norms:
    """Return the norms of a gradient's blocks."""
    return _norms_of_all([gradient])[0]


def _norms_of_all(gradients: Sequence[Tensor]) -> list[Norms]:
    blocks = [_blocks_of(gradient) for gradient in gradients]
    together = [*chain.from_iterable(blocks)]
    norms = iter(torch._foreach_norm(together) if together else ())
    return [list(islice(norms, len(own))) for own in blocks]


def _blocks_of(gradient: Tensor) -> Sequence[Tensor]:
    if gradient.layout is torch.strided and gradient.is_contiguous() and gradient.numel() <= NORM_BLOCK:
        return [_wide(gradient)]  # a single block, as for most gradients
    return [*map(_wide, _flat(gradient).split(NORM_BLOCK))]


def _flat(gradient: Tensor) -> Tensor:
    values = sparse.stored(sparse.coalesced(gradient))
    if values.is_contiguous() or is_dense(values):
        return in_order(values, values.stride())
    return values.reshape(-1)


def _wide(block: Tensor) -> Tensor:
    """Return a half-precision block in float32, because its norm would have only two or three digits."""
    return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block


def gather_norms(
    job: Job, plan: Plan, averages: Sequence[Average], dtypes: Sequence[torch.dtype], what: str
) -> dict[int, Norms]:
    """Return the norms of all averages, by parameter, in the same order on all workers.

    Args:
        job: this worker's job.
        plan: the step's plan; if it is sharded, all workers must call this.
        averages: this worker's averages, without absent ones.
        dtypes: the dtype of each parameter's average.
        what: the message's name in an error.
    """
    norms = _norms_of_all([each.gradient for each in averages if each.gradient is not None])
    if not plan.is_sharded:
        return {each.parameter: own for each, own in zip(averages, norms, strict=True)}
    found = {(each.parameter, each.start): own for each, own in zip(averages, norms, strict=True)}
    found |= _gather(job, plan, found, dtypes, what)
    parts: dict[int, list[Norms]] = {}
    for index, start in sorted(found):
        parts.setdefault(index, []).append(found[index, start])
    return {index: [*chain.from_iterable(parts[index])] for index in plan.order if index in parts}


def _gather(
    job: Job, plan: Plan, own: Mapping[_Place, Norms], dtypes: Sequence[torch.dtype], what: str
) -> dict[_Place, Norms]:
    """Gather the norms of all workers' shards, given the norms of this worker's shard."""
    like = torch.zeros(1, dtype=torch.float64, device=job.device)
    rows = [like]  # one number, so that no worker's message is empty
    for piece in plan.shards[job.rank]:
        norms = own.get((piece.parameter, piece.elements.start))
        absent = like.new_full((_num_blocks(piece),), _ABSENT)
        rows.append(absent if norms is None else torch.stack(list(norms)).double())
    sizes = [1 + sum(map(_num_blocks, shard)) for shard in plan.shards]
    table = gather_rows(job.transport, torch.cat(rows), sizes, what)
    found: dict[_Place, Norms] = {}
    for shard, row, row_on_host in zip(
        plan.shards, table.split(sizes), table.cpu().split(sizes), strict=True
    ):
        start = 1
        for piece in shard:
            blocks = slice(start, start + _num_blocks(piece))
            start = blocks.stop
            if _ABSENT not in row_on_host[blocks].tolist():
                dtype = torch.promote_types(dtypes[piece.parameter], torch.float32)
                found[piece.parameter, piece.elements.start] = row[blocks].to(dtype).unbind()
    return found


def _num_blocks(piece: Piece) -> int:
    return max(1, -(-len(piece.elements) // NORM_BLOCK))


def total_norm(norms: Iterable[Norms]) -> Tensor:
    """Return the norm over all gradients, 0-dim, given the norms of their blocks; 0 without gradients."""
    each = [own[0] if len(own) == 1 else _norm(own) for own in norms]
    return _norm(each) if each else torch.tensor(0.0, device="cpu")


def _norm(norms: Norms) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def squared_sum(norms: Norms, device: torch.device) -> Tensor:
    """Return the sum of squared norms, float64 0-dim; 0 if there are none."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(norms)).double().square().sum()
