"""Which worker updates which elements of which parameter.

Parameters are cut in memory order, at multiples of 64 elements from their first: vector instructions of any
width begin there, too, so an elementwise kernel computes each element as in the whole tensor. If workers
compute the norms of their shards, cuts lie between the blocks of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from samestep.errors import ConfigError
from samestep.sharding.shards import Shard
from samestep.summation.layout import is_dense
from samestep.summation.norms import NORM_BLOCK
from samestep.towers.replica import Kind
from samestep.towers.towers import Towers

__all__ = ["cut", "deal", "divide"]

_ALIGNMENT = 64


def divide(
    parameters: Sequence[Tensor], towers: Towers, loads: list[int], *, is_elementwise: bool
) -> dict[int, list[Shard]]:
    """Return the shards of each parameter, by its id.

    Args:
        parameters: of an optimizer.
        towers: average their gradients.
        loads: how many elements each worker already has; updated in place.
        is_elementwise: whether the optimizer may update parts of parameters.

    Raises:
        ConfigError: a parameter is listed twice, or is not dense.
    """
    _check(parameters)
    job, replica = towers.job, towers._replica
    plan = replica.plan(Kind(towers.placement))
    is_cut = is_elementwise and (job.device.type != "cpu" or torch.get_num_threads() == 1)
    sparse = replica.sparse_parameters()
    pieces = {id(p): p for p in parameters if is_cut and id(p) not in sparse}
    whole = [p for p in parameters if id(p) not in pieces]
    found = dict(zip(map(id, whole), deal(whole, loads), strict=True))
    # If all workers average whole buckets, even with all layers thawed, no worker computes a shard's norms.
    is_small = plan.is_whole and replica.plan_of([*pieces.values()], plan.placement).is_whole
    alignment = _ALIGNMENT if is_small else NORM_BLOCK
    # Bucket by bucket, so that each worker averages a part of every bucket.
    bucket_of = {plan.parameters[i].name: n for n, each in enumerate(plan.buckets) for i in each.parameters}
    buckets: dict[int | None, list[Tensor]] = {}
    for name, parameter in towers._root.named_parameters():
        if id(parameter) in pieces and parameter.requires_grad:
            buckets.setdefault(bucket_of.get(name), []).append(pieces.pop(id(parameter)))
    for bucket in buckets.values():
        found |= zip(map(id, bucket), cut(bucket, loads, alignment), strict=True)
    # Frozen parameters are cut one by one, because any of them may be trained later.
    loads_of_frozen = [0] * job.world_size
    for single in pieces.values():
        (found[id(single)],) = cut([single], loads_of_frozen, alignment)
    return found


def cut(parameters: Sequence[Tensor], loads: list[int], alignment: int = _ALIGNMENT) -> list[list[Shard]]:
    """Cut parameters, laid end to end, so that the workers' loads become equal; return each one's shards.

    Each worker gets one run of elements, the least loaded worker first; `loads` is updated in place. A
    parameter is cut at multiples of `alignment` elements from its first.
    """
    fair = (sum(loads) + sum(p.numel() for p in parameters)) / len(loads)
    workers = sorted(range(len(loads)), key=loads.__getitem__)
    ends = list(accumulate(max(0.0, fair - loads[worker]) for worker in workers))[:-1]
    shards, offset = [], 0
    for parameter in parameters:
        size = parameter.numel()
        cuts = [0, *(_nearest(end - offset, size, alignment) for end in ends), size]
        parts = [(worker, range(*part)) for worker, part in zip(workers, pairwise(cuts), strict=True)]
        parts = [part for part in parts if part[1]] or parts[:1]
        shards.append([Shard(parameter, elements, worker) for worker, elements in parts])
        offset += size
    for shard in chain.from_iterable(shards):
        loads[shard.worker] += len(shard.elements)
    return shards


def _nearest(element: float, size: int, alignment: int) -> int:
    """Return the nearest element at which a tensor may be cut."""
    element = min(size, max(0, element))
    before = int(element) // alignment * alignment
    after = min(size, before + alignment)
    return before if element - before <= after - element else after


def deal(parameters: Sequence[Tensor], loads: list[int]) -> list[list[Shard]]:
    """Give each whole parameter to the least loaded worker, the largest first; update `loads` in place."""
    shards: dict[int, Shard] = {}
    for parameter in sorted(parameters, key=lambda p: (not p.requires_grad, -p.numel())):
        worker = loads.index(min(loads))
        loads[worker] += parameter.numel()
        shards[id(parameter)] = Shard(parameter, range(parameter.numel()), worker)
    return [[shards[id(parameter)]] for parameter in parameters]


def _check(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if not is_dense(parameter):
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)}, strides {parameter.stride()}, does not fill "
                "its memory: create it from a contiguous tensor"
            )
    if len(set(map(id, parameters))) < len(parameters):
        raise ConfigError("a parameter is listed twice: list each of them once")
