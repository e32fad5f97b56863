"""One bucket of one step on its way: packed, added up shard by shard, handed to the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from samestep.summation.buckets import FAILED, Bucket, pack, unpack
from samestep.summation.gradients import Gradients, add_partial_sums, divide
from samestep.summation.plan import Plan
from samestep.workers.job import Job
from samestep.workers.transport import Pending, Tensors

__all__ = ["BucketExchange", "LocalBucket", "Node", "SharedBucket", "exchange_bucket"]

Node = tuple[range, Gradients]
"""A subtree of the canonical tree, as the towers under it, and its sum."""


class LocalBucket:
    """The bucket of a job of one worker: nothing is sent, so nothing is packed."""

    def __init__(self, bucket: Bucket, nodes: Sequence[Node] | None) -> None:
        self._bucket = bucket
        self._gradients = [] if nodes is None else nodes[0][1]
        self._divisor = torch.ones(())
        self.has_failed = nodes is None

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> None:
        """Do nothing."""

    def average(self, divisor: Tensor, what: str) -> None:
        """Note what to divide by."""
        self._divisor = divisor

    def wait(self) -> None:
        """Do nothing."""

    def gradients(self) -> Iterator[tuple[int, Tensor | None]]:
        """Divide in place."""
        for index, gradient in zip(self._bucket.parameters, self._gradients, strict=True):
            if gradient is not None:
                divide(gradient, self._divisor, out=gradient)
            yield index, gradient


class SharedBucket:
    """A bucket of which each worker averages one shard, or, where it is small, all of it.

    Workers send each other the shards of their subtrees; each finishes the canonical tree on its own shard
    and divides once; then all send each other the finished shards. The averages end in the memory of this
    worker's first subtree, which is made for the step and given away with the gradients.

    Args:
        job: of this worker.
        plan: of the step.
        bucket: which one.
        nodes: this worker's partial sums; None where it met an error.
    """

    def __init__(self, job: Job, plan: Plan, bucket: Bucket, nodes: Sequence[Node] | None) -> None:
        self._job = job
        self._plan = plan
        self._bucket = bucket
        self._others = [worker for worker in range(job.world_size) if worker != job.rank]
        like = torch.empty(0, dtype=bucket.dtype, device=job.device)
        self._rows = [like.new_empty(bucket.num_elements) for _ in plan.spans[job.rank]]
        self._used_here = [True] * len(bucket.parameters)
        if nodes is None:
            for row in self._rows:
                row.fill_(FAILED)
        else:
            self._fill(nodes)
        size = len(bucket.shards[job.rank])
        self._arrived = {worker: like.new_empty(len(plan.spans[worker]), size) for worker in self._others}
        self._pending: Pending | None = None

    def _fill(self, nodes: Sequence[Node]) -> None:
        for row, (_, gradients) in zip(self._rows, nodes, strict=True):
            pack(self._bucket, row, gradients)
        columns = zip(*([g is not None for g in gradients] for _, gradients in nodes), strict=True)
        self._used_here = [any(column) for column in columns]

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> None:
        """Start to send each worker its shard of this worker's partial sums."""
        sent = {worker: [*outgoing.get(worker, ()), *self._partial_sums(worker)] for worker in self._others}
        filled = {worker: [*incoming.get(worker, ()), *self._arrived[worker]] for worker in self._others}
        self._pending = self._job.transport.post(sent, filled, what)

    def average(self, divisor: Tensor, what: str) -> None:
        """Finish the tree on this worker's shard, divide, and start to send the shard to all."""
        self.wait()
        rank = self._job.rank
        partial_sums: Mapping[int, Sequence[Tensor]] = {
            **{worker: list(rows) for worker, rows in self._arrived.items()},
            rank: self._partial_sums(rank),
        }
        averages = [self._rows[0][shard.start : shard.stop] for shard in self._bucket.shards]
        divide(add_partial_sums(self._plan.spans, partial_sums, rank), divisor, out=averages[rank])
        self._arrived.clear()
        del self._rows[1:]
        if not self._bucket.is_whole:
            self._pending = self._job.transport.post(
                {worker: [averages[rank]] for worker in self._others},
                {worker: [averages[worker]] for worker in self._others},
                what,
            )

    def wait(self) -> None:
        """Wait for what is under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    @property
    def has_failed(self) -> bool:
        """Whether some worker met an error instead of filling the bucket."""
        return self._job.device.type == "cpu" and bool(self._bucket.flags_in(self._rows[0])[-1].isnan())

    def gradients(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield views of the averages."""
        yield from unpack(self._bucket, self._rows[0], self._used_here)

    def _partial_sums(self, worker: int) -> list[Tensor]:
        shard = self._bucket.shards[worker]
        return [row[shard.start : shard.stop] for row in self._rows]


BucketExchange = LocalBucket | SharedBucket
"""`post`, `average`, `wait` and `gradients`, in this order, on all workers alike."""


def exchange_bucket(job: Job, plan: Plan, bucket: Bucket, nodes: Sequence[Node] | None) -> BucketExchange:
    """Return the way of a bucket with this worker's partial sums; None stands for an error."""
    if job.world_size == 1:
        return LocalBucket(bucket, nodes)
    return SharedBucket(job, plan, bucket, nodes)
