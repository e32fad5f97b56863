"""The exchange of one bucket in one step: pack it, finish the sums shard by shard, unpack the averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from samestep.summation.buckets import Average, Bucket, pack, unpack
from samestep.summation.gradients import Gradients, add_partial_sums, divide
from samestep.summation.plan import Plan
from samestep.workers.collectives import post_to_all
from samestep.workers.job import Job
from samestep.workers.transport import Pending

__all__ = ["LocalBucket", "Node", "SharedBucket"]

Node = tuple[range, Gradients]
"""A subtree of the canonical tree: its towers, and their sum."""


class LocalBucket:
    """A bucket in a job of one worker: nothing is sent, so nothing is packed."""

    def __init__(self, bucket: Bucket, nodes: Sequence[Node]) -> None:
        ((_, gradients),) = nodes
        self._gradients = list(zip(bucket.parameters, gradients, strict=True))

    def post(self, extra: Sequence[Sequence[Tensor]], what: str) -> None:
        """Do nothing."""

    def average(self, divisor: Tensor) -> None:
        """Divide in place."""
        for _, gradient in self._gradients:
            if gradient is not None:
                divide(gradient, divisor, out=gradient)

    def send_averages(self, what: str) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def averages(self) -> Iterable[Average]:
        """Return the averages."""
        return (Average(index, 0, gradient) for index, gradient in self._gradients)


class SharedBucket:
    """A bucket in a job of several workers: each averages one shard, or the whole bucket if it is small.

    Workers send each other the shards of their subtrees. Each finishes the canonical tree on its own shard
    and divides once. Then all send each other their averages, unless each needs only its own. Messages are
    sent from the transport's memory; the averages are in new memory, which the gradients keep. If `nodes` is
    None, the bucket is sent without values.
    """

    def __init__(self, job: Job, plan: Plan, bucket: Bucket, nodes: Sequence[Node] | None) -> None:
        self._job = job
        self._plan = plan
        self._bucket = bucket
        like, size = torch.empty(0, dtype=bucket.dtype, device=job.device), len(bucket.shards[job.rank])
        self._rows = [job.transport.empty(bucket.num_elements, like) for _ in plan.spans[job.rank]]
        self._averages = like
        self._used_here = dict.fromkeys(bucket.parameters, True)
        if nodes is not None:
            for row, (_, gradients) in zip(self._rows, nodes, strict=True):
                pack(bucket, row, gradients)
            columns = zip(*(gradients for _, gradients in nodes), strict=True)
            used = [any(gradient is not None for gradient in column) for column in columns]
            self._used_here = dict(zip(bucket.parameters, used, strict=True))
        # All workers' sums of this worker's shard: added in place, so in memory that no other worker reads.
        self._sums = [list(like.new_empty(len(spans), size)) for spans in plan.spans]
        self._sums[job.rank] = [part.clone() if bucket.is_whole else part for part in self._cut(job.rank)]
        self._pending: Pending | None = None
        self._is_shared = False

    def _cut(self, worker: int) -> list[Tensor]:
        shard = self._bucket.shards[worker]
        return [row[shard.start : shard.stop] for row in self._rows]

    def post(self, extra: Sequence[Sequence[Tensor]], what: str) -> None:
        """Start to send each worker its shard of this worker's sums, with this worker's part of `extra`."""
        others = [worker for worker in range(self._job.world_size) if worker != self._job.rank]
        outgoing = {worker: [*extra[self._job.rank], *self._cut(worker)] for worker in others}
        incoming = {worker: [*extra[worker], *self._sums[worker]] for worker in others}
        self._pending = self._job.transport.post(outgoing, incoming, what)

    def average(self, divisor: Tensor) -> None:
        """Finish the tree on this worker's shard, and divide; after an interrupt, it can be called again."""
        self.wait()
        if self._sums:
            rank, shard = self._job.rank, self._bucket.shards[self._job.rank]
            total = add_partial_sums(self._plan.spans, self._sums, rank)
            average = total
            if self._bucket.is_sharded:
                average = torch.empty_like(total)  # because the transport reuses the memory of `total`
            elif self._bucket.is_gathered:
                average = self._rows[0][shard.start : shard.stop]
            divide(total, divisor, out=average)
            self._averages = average
            if self._bucket.is_gathered:
                self._averages = average.new_empty(self._bucket.num_elements)
                self._averages[shard.start : shard.stop] = average
        self._sums.clear()
        del self._rows[1:]

    def send_averages(self, what: str) -> None:
        """Start to send this worker's averages to all workers, unless that is done or not needed."""
        if self._bucket.is_gathered and not self._is_shared:
            averages = [[self._averages[shard.start : shard.stop]] for shard in self._bucket.shards]
            averages[self._job.rank] = self._cut(self._job.rank)
            self._pending = post_to_all(self._job.transport, averages, what)
            self._is_shared = True
        self._rows.clear()

    def wait(self) -> None:
        """Wait for pending messages; after an interrupt, it can be called again."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def averages(self) -> Iterable[Average]:
        """Return this worker's averages, as views."""
        section = self._bucket.sections[self._job.rank if self._bucket.is_sharded else 0]
        return unpack(section, self._averages, self._used_here)
