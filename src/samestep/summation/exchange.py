"""Partial sums across workers: every worker ends with the same average, bit for bit.

For each bucket, workers send each other partial sums along the canonical tree, each finishes the tree on its
share and divides once, and all send each other the results (`bucket_exchange.py`). No arithmetic happens in
the network, and where W divides T into runs of a power of two the bytes moved are those of a ring all-reduce.

With the first bucket travel the scalars (`scalars.py`) and a header: numbers that must be the same on every
worker, and flags. A worker that met an error, or that has a new plan, sends its first message all the same,
unfilled, and says so in the header. So all workers learn of it, and none waits for a message that never
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NoReturn

import torch
from torch import Tensor

from samestep.errors import DisagreementError, LostWorkerError
from samestep.summation.bucket_exchange import LocalBucket, Node, SharedBucket
from samestep.summation.gradients import Gradients
from samestep.summation.plan import Plan
from samestep.summation.scalars import ScalarExchange, Scalars, TowerScalars
from samestep.summation.sparse_exchange import SparseExchange
from samestep.workers.agreement import agree
from samestep.workers.collectives import post_to_all
from samestep.workers.job import Job

__all__ = ["Exchange"]

_FINE, _FAILED, _CHANGED = range(3)
"""A worker's status, in its header."""


class Exchange:
    """One step's exchange of one worker: `start`, `send` for each bucket as it fills, `finish`.

    In a step with sums to count, or of the whole batch, `compare` comes first. Everything but `compare` and
    `finish` only starts what can be started; all workers start the same things in the same order. What waits
    raises `DisagreementError` where numbers that must match differ, or another worker met an error.

    Args:
        job: of this worker.
        plan: that all workers have agreed on.
        must_match: numbers that must be the same on every worker, "step" among them.
        flags: called once, when the first bucket is sent; its bits are OR-ed over all workers.
    """

    def __init__(
        self, job: Job, plan: Plan, must_match: Mapping[str, int], *, flags: Callable[[], int] = int
    ) -> None:
        self.plan = plan
        self.where = f"step {must_match['step']}"
        self.is_over = False  # whether the workers found an error or a difference; then all of them raise
        self._job = job
        self._must_match = must_match
        self._ask_flags = flags
        self._described: Mapping[str, object] = {**must_match, **plan.description}
        self._status = _FINE
        self._error: BaseException | None = None
        self._compared = not (plan.sums or plan.is_whole_batch)
        self._scalars = ScalarExchange(job, plan)
        self._known: Scalars | None = None
        self._headers: list[Tensor] = []
        self._buckets: list[LocalBucket | SharedBucket] = []

    def compare(self, counts: Tensor) -> Tensor:
        """Return what all towers count, float64 [T, K], given this worker's, before the first pass."""
        self._compared = True
        tables = [counts.new_empty(len(own), counts.shape[1]) for own in self.plan.placement.ranges]
        tables[self._job.rank] = counts
        headers = self._new_headers()
        rows = list(zip(headers, tables, strict=True))
        post_to_all(self._job.transport, rows, f"{self.where}, counts").wait()
        self._check(headers)
        return torch.cat(tables)

    def change_to(self, plan: Plan) -> None:
        """Agree on a new plan, or raise `DisagreementError` on all workers.

        The message is laid out by the plan that they had before, because one that kept it expects that.
        """
        self._described = {**self._must_match, **plan.description}
        self._status = _CHANGED
        if self._job.world_size > 1:
            self._send_unfilled()

    def fail(self, error: BaseException) -> NoReturn:
        """Send the other workers an error, instead of what they wait for, and raise it.

        What has been sent before stays as it was; the last message that is still to come says so.
        """
        if self.is_over or isinstance(error, LostWorkerError) or self._job.world_size == 1:
            self.is_over = True
            raise error
        self._status, self._error = _FAILED, error
        if not self._buckets:
            self._send_unfilled()
        else:
            while len(self._buckets) < len(self.plan.buckets):
                self.send(None)
            self.finish(None)
        raise error

    def _send_unfilled(self) -> None:
        if not self._compared:
            num_towers = len(self.plan.placement.towers(self._job.rank))
            self.compare(torch.zeros(num_towers, len(self.plan.sums), dtype=torch.float64))
        else:
            self.send(None)
            self._wait_for_first()

    def start(self, towers: Sequence[TowerScalars]) -> None:
        """Note the scalars of all this worker's towers, which travel with the first bucket."""
        self._scalars.put(towers)

    def send(self, nodes: Sequence[Node] | None) -> None:
        """Send the next bucket's sums of this worker's subtrees, and go on with the bucket before it.

        `nodes` are None where it met an error.
        """
        bucket = self.plan.buckets[len(self._buckets)]
        beside: list[list[Tensor]] = [[] for _ in range(self._job.world_size)]
        if self._buckets:
            self._average(self._buckets[-1])
        else:
            self._headers = self._new_headers(0 if nodes is None else self._ask_flags())
            beside = [[header, *self._scalars.of(worker)] for worker, header in enumerate(self._headers)]
        if nodes is not None and self._job.world_size == 1:
            self._buckets.append(LocalBucket(bucket, nodes))
        else:
            self._buckets.append(SharedBucket(self._job, self.plan, bucket, nodes))
        self._buckets[-1].post(beside, f"{self.where}, gradients")

    def finish(self, sparse_sums: Sequence[Gradients] | None) -> list[tuple[int, Tensor | None]]:
        """Wait for everything; return (parameter index, averaged gradient) for each parameter.

        `sparse_sums` has, for each of this worker's subtrees, the gradients of `plan.sparse`; None where it
        met an error.
        """
        divisor = self.scalars.divisor
        sparse = SparseExchange(self._job, self.plan, sparse_sums, self.where) if self.plan.sparse else None
        self._average(self._buckets[-1])
        gradients = sparse.finish(divisor) if sparse else []
        # Taken off, so that no gradient lives here once the caller has let go of it.
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.wait()
        if (sparse and sparse.has_failed) or any(bucket.has_failed for bucket in buckets):
            self._settle()
        return [*(each for bucket in buckets for each in bucket.gradients()), *gradients]

    @property
    def scalars(self) -> Scalars:
        """The scalars of all towers, once it is clear that all workers agree."""
        if self._known is None:
            self._wait_for_first()
            self._known = self._scalars.result()
        return self._known

    @property
    def flags(self) -> int:
        """The bits that any worker has set, once `scalars` are there."""
        return reduce(or_, (int(header[0]) for header in self._headers))

    def _average(self, bucket: LocalBucket | SharedBucket) -> None:
        bucket.average(self.scalars.divisor, f"{self.where}, averages")

    def _wait_for_first(self) -> None:
        self._buckets[0].wait()
        self._check(self._headers)

    def _new_headers(self, flags: int = 0) -> list[Tensor]:
        """Return this worker's header, int64 [n], and one for each other worker to be filled."""
        own = torch.tensor([flags, self._status, self.plan.fingerprint, *self._must_match.values()])
        headers = [torch.empty_like(own) for _ in range(self._job.world_size)]
        headers[self._job.rank] = own
        return headers

    def _check(self, headers: Sequence[Tensor]) -> None:
        own = headers[self._job.rank]
        if own[1] != _FINE or any(not torch.equal(header[1:], own[1:]) for header in headers):
            self._settle()

    def _settle(self) -> None:
        """Exchange errors and descriptions, and raise unless all workers have the same and none failed."""
        self.is_over = True
        agree(self._job, self._described, where=self.where, error=self._error)
        if self._status != _CHANGED:
            raise DisagreementError(f"{self.where}: workers differ, and none of them can say in what")
