"""Partial sums across workers: every worker ends with the same average, bit for bit.

A worker owns one shard of every bucket. For each bucket, workers send each other the shards of their
subtrees, each finishes the canonical tree on its own shard and divides once by the total weight, and
then all send each other the finished shards. No arithmetic happens in the network, and where W divides T
into runs of a power of two the bytes moved are those of a ring all-reduce.

Before anything else of a step, workers compare a few numbers; where they differ, or where one of
them failed, no gradient is sent and all raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.agreement import agree
from samestep.buckets import Bucket, pack, unpack, views
from samestep.errors import DisagreementError, Error
from samestep.job import Job
from samestep.placement import Placement
from samestep.reduction import Gradients, TreeSum, divide, subtrees
from samestep.transport import Transport

__all__ = ["Exchange", "Figures", "Node"]

Node = tuple[range, Gradients]
"""A subtree of the canonical tree, as the towers under it, and its sum."""


@dataclass(frozen=True)
class Figures:
    """What is small enough for every worker to hold whole.

    Attributes:
        scalars: float64 [T, F], one row a tower.
        totals: float64 [S], sums over all towers along the canonical tree.
        weight: float64 0-dim, the sum of the towers' weights.
    """

    scalars: Tensor
    totals: Tensor
    weight: Tensor


class Exchange:
    """The exchange of one model's gradients; `begin`, then `figures`, then `bucket` for each, in order."""

    def __init__(
        self, job: Job, placement: Placement, parameters: Sequence[Tensor], buckets: Sequence[Bucket]
    ) -> None:
        self.buckets = buckets
        self._job = job
        self._placement = placement
        self._parameters = parameters
        self._transport = Transport(job)
        self._spans = [subtrees(towers, placement.num_towers) for towers in placement.ranges()]
        self._memory: dict[Bucket, _BucketMemory] = {}
        self._others = [worker for worker in range(job.world_size) if worker != job.rank]
        self._where = ""
        self._agreed: Future[None] | None = None
        self._figures: Future[Figures] | None = None

    # ---- agreement ---------------------------------------------------------------------------------

    def begin(self, step: int, facts: Mapping[str, int], error: Error | None = None) -> None:
        """Start a step: compare `facts`, the same numbers on every worker, in the background."""
        self._where = f"step {step}"
        self._agreed = self._transport.submit(lambda: self._agree({"step": step, **facts}, error))

    def check_agreement(self, *, wait: bool) -> None:
        """Raise what the agreement came to, if it is known by now or `wait` is set."""
        assert self._agreed is not None
        if wait or self._agreed.done():
            self._agreed.result()

    def _agree(self, facts: Mapping[str, int], error: Error | None) -> None:
        mine = torch.tensor([error is not None, *facts.values()], dtype=torch.int64)
        theirs = {worker: [torch.empty_like(mine)] for worker in self._others}
        self._transport.swap({worker: [mine] for worker in self._others}, theirs, self._where)
        if error is not None or any(not torch.equal(mine, numbers) for (numbers,) in theirs.values()):
            agree(self._job, facts, where=self._where, error=error)
            raise DisagreementError(f"{self._where}: workers disagreed")

    # ---- figures -----------------------------------------------------------------------------------

    def figures(self, scalars: Tensor, nodes: Sequence[tuple[range, Tensor]]) -> None:
        """Send this worker's scalars (float64 [K, F], weights in column 1) and partial sums (each [S])."""
        self._figures = self._transport.submit(lambda: self._finish_figures(scalars, nodes))

    def wait_for_figures(self) -> Figures:
        """Return the figures of all towers."""
        assert self._figures is not None
        return self._figures.result()

    def _finish_figures(self, scalars: Tensor, nodes: Sequence[tuple[range, Tensor]]) -> Figures:
        self.check_agreement(wait=True)
        partials = torch.stack([value for _, value in nodes])
        rows = {self._job.rank: scalars}
        sums = {self._job.rank: partials}
        for worker in self._others:
            rows[worker] = scalars.new_empty(len(self._placement.towers(worker)), scalars.shape[1])
            sums[worker] = partials.new_empty(len(self._spans[worker]), partials.shape[1])
        received = {worker: [rows[worker], sums[worker]] for worker in self._others}
        self._transport.swap(
            {worker: [scalars, partials] for worker in self._others}, received, f"{self._where}, figures"
        )
        everyone = torch.cat([rows[worker] for worker in range(self._job.world_size)])
        return Figures(everyone, self._finish_tree(sums), everyone[:, 1].sum())

    def _finish_tree(self, partials: Mapping[int, Tensor]) -> Tensor:
        """Add all workers' subtrees, row by row, in the canonical order; works in place."""
        total: TreeSum[Tensor] = TreeSum(self._placement.num_towers, add=Tensor.add_)
        for worker, spans in enumerate(self._spans):
            for span, row in zip(spans, partials[worker], strict=True):
                total.push(span, row)
        return total.root()

    # ---- gradients ---------------------------------------------------------------------------------

    def bucket(self, bucket: Bucket, nodes: Sequence[Node]) -> Future[list[tuple[int, Tensor | None]]]:
        """Send one bucket's partial sums; the future gives (parameter index, averaged gradient)."""
        return self._transport.submit(lambda: self._finish_bucket(bucket, nodes))

    def _finish_bucket(self, bucket: Bucket, nodes: Sequence[Node]) -> list[tuple[int, Tensor | None]]:
        weight = self.wait_for_figures().weight
        if self._job.world_size == 1:
            ((_, gradients),) = nodes
            for gradient in gradients:
                if gradient is not None and not _is_one(weight):
                    divide(gradient, weight, out=gradient)
            return list(zip(bucket.parameters, gradients, strict=True))
        memory = self._memory_of(bucket)
        for row, places, (_, gradients) in zip(memory.rows, memory.places, nodes, strict=True):
            pack(bucket, row, places, gradients)
        used_here = [
            any(column) for column in zip(*([g is not None for g in gs] for _, gs in nodes), strict=True)
        ]
        self._exchange(memory, weight)
        return list(unpack(bucket, memory.rows[0], memory.places[0], used_here))

    def _exchange(self, memory: _BucketMemory, weight: Tensor) -> None:
        rank, rows = self._job.rank, memory.rows
        shards = [rows[:, shard.start : shard.stop] for shard in memory.shards]
        self._transport.swap(
            {worker: list(shards[worker]) for worker in self._others},
            {worker: list(memory.arrived[worker]) for worker in self._others},
            f"{self._where}, gradients",
        )
        flat = [rows[0, shard.start : shard.stop] for shard in memory.shards]
        divide(self._finish_tree({**memory.arrived, rank: shards[rank]}), weight, out=flat[rank])
        self._transport.swap(
            {worker: [flat[rank]] for worker in self._others},
            {worker: [flat[worker]] for worker in self._others},
            f"{self._where}, averages",
        )

    def _memory_of(self, bucket: Bucket) -> _BucketMemory:
        # Kept from step to step: fresh pages for every exchange cost more than the copies into them.
        if bucket not in self._memory:
            spans = [len(spans) for spans in self._spans]
            self._memory[bucket] = _BucketMemory.allocate(bucket, self._job, spans, self._parameters)
        return self._memory[bucket]


def _is_one(weight: Tensor) -> bool:
    """Whether dividing would change nothing; not asked of a GPU, which would have to be waited for."""
    return weight.device.type == "cpu" and float(weight) == 1.0


@dataclass(frozen=True)
class _BucketMemory:
    """The buffers of one bucket: `rows[0]` holds the averages in the end.

    Attributes:
        rows: [subtrees of this worker, elements].
        places: for each row, each parameter's view of it.
        shards: which elements each worker owns.
        arrived: for each other worker, [its subtrees, elements of this worker's shard].
    """

    rows: Tensor
    places: list[list[Tensor]]
    shards: list[range]
    arrived: dict[int, Tensor]

    @classmethod
    def allocate(
        cls, bucket: Bucket, job: Job, spans: Sequence[int], parameters: Sequence[Tensor]
    ) -> _BucketMemory:
        like = torch.empty(0, dtype=bucket.dtype, device=job.device)
        rows = like.new_zeros(spans[job.rank], bucket.num_elements)
        width = bucket.num_elements // job.world_size
        shards = [range(worker * width, (worker + 1) * width) for worker in range(job.world_size)]
        others = [worker for worker in range(job.world_size) if worker != job.rank]
        arrived = {worker: like.new_empty(spans[worker], width) for worker in others}
        return cls(rows, [views(bucket, row, parameters) for row in rows], shards, arrived)
