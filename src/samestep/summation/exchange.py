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
from samestep.summation.bucket_exchange import BucketExchange, Node, exchange_bucket
from samestep.summation.gradients import Gradients
from samestep.summation.plan import Plan
from samestep.summation.scalars import ScalarExchange, Scalars, TowerScalars
from samestep.summation.sparse_exchange import SparseExchange
from samestep.workers.agreement import agree
from samestep.workers.job import Job
from samestep.workers.transport import Pending

__all__ = ["Exchange"]

_FINE, _FAILED, _CHANGED = range(3)
"""A worker's status, in its header."""


class Exchange:
    """One step's exchange of one worker: `start`, `send` for each bucket as it fills, `finish`.

    In a step with sums to count, or of the whole batch, `compare` comes first. Everything but `compare` and
    `finish` only starts what can be started; all workers start the same things in the same order.

    Args:
        job: of this worker.
        plan: that all workers have agreed on.
        must_match: numbers that must be the same on every worker, "step" among them.
        flags: called once, when the first bucket is sent; its bits are OR-ed over all workers.

    Attributes:
        plan: see above.
        where: names the step in messages.
        is_over: whether the workers found an error or a difference; then all of them raise.
    """

    def __init__(
        self, job: Job, plan: Plan, must_match: Mapping[str, int], *, flags: Callable[[], int] = int
    ) -> None:
        self.plan = plan
        self._job = job
        self._must_match = must_match
        self.where = f"step {must_match['step']}"
        self._ask_flags = flags
        self._others = [worker for worker in range(job.world_size) if worker != job.rank]
        self._described: Mapping[str, object] = {**must_match, **plan.description}
        self._status = _FINE
        self._error: BaseException | None = None
        self.is_over = False
        self._compared = not (plan.sums or plan.is_whole_batch)
        self._scalars = ScalarExchange(job, plan)
        self._known: Scalars | None = None
        self._headers: dict[int, Tensor] = {}
        self._buckets: list[BucketExchange] = []

    def compare(self, counts: Tensor) -> Tensor:
        """Return what all towers count, float64 [T, K], given this worker's, once all workers agree.

        It is a message of its own, before the first pass.

        Raises:
            DisagreementError: numbers that must match differ, or another worker met an error.
        """
        self._compared = True
        sizes = [len(towers) for towers in self.plan.placement.ranges]
        tables = [counts.new_empty(size, counts.shape[1]) for size in sizes]
        tables[self._job.rank] = counts
        headers = self._new_headers()
        self._post({worker: [headers[worker], tables[worker]] for worker in headers}, "counts").wait()
        self._check(headers)
        return torch.cat(tables)

    def change_to(self, plan: Plan) -> None:
        """Agree on a new plan, which must be the same on all workers.

        The message is laid out by the plan that they had before, because one that kept it expects that.

        Raises:
            DisagreementError: other workers have a different one, or met an error.
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
        """Send the next bucket's partial sums, and go on with the bucket before it.

        Args:
            nodes: of this worker's subtrees; None where it met an error.
        """
        bucket = self.plan.buckets[len(self._buckets)]
        if self._buckets:
            self._average(self._buckets[-1])
        exchange = exchange_bucket(self._job, self.plan, bucket, nodes)
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[Tensor]] = {}
        if not self._buckets:
            self._headers = self._new_headers(0 if nodes is None else self._ask_flags())
            for worker in self._others:
                own = self._job.rank
                outgoing[worker] = [self._headers[own], *self._scalars.of(own)]
                incoming[worker] = [self._headers[worker], *self._scalars.of(worker)]
        exchange.post(outgoing, incoming, f"{self.where}, gradients")
        self._buckets.append(exchange)

    def finish(self, sparse_sums: Sequence[Gradients] | None) -> list[tuple[int, Tensor | None]]:
        """Wait for everything; return (parameter index, averaged gradient) for each parameter.

        Args:
            sparse_sums: for each of this worker's subtrees, the gradients of `plan.sparse`; None where it
                met an error.

        Raises:
            DisagreementError: another worker met an error after it had sent its first bucket.
        """
        divisor = self.scalars.divisor
        sparse = SparseExchange(self._job, self.plan, sparse_sums, self.where)
        self._average(self._buckets[-1])
        gradients = list(sparse.gradients(divisor))
        # Taken off, so that no gradient lives here once the caller has let go of it.
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.wait()
        if sparse.has_failed or any(bucket.has_failed for bucket in buckets):
            self._settle()
        return [*(each for bucket in buckets for each in bucket.gradients()), *gradients]

    @property
    def scalars(self) -> Scalars:
        """The scalars of all towers, once it is clear that all workers agree.

        Raises:
            DisagreementError: numbers that must match differ, or another worker met an error.
        """
        if self._known is None:
            self._wait_for_first()
            self._known = self._scalars.result()
        return self._known

    @property
    def flags(self) -> int:
        """The bits that any worker has set, once `scalars` are there."""
        return reduce(or_, (int(header[0]) for header in self._headers.values()))

    def _average(self, bucket: BucketExchange) -> None:
        bucket.average(self.scalars.divisor, f"{self.where}, averages")

    def _wait_for_first(self) -> None:
        self._buckets[0].wait()
        self._check(self._headers)

    def _new_headers(self, flags: int = 0) -> dict[int, Tensor]:
        """Return this worker's header, int64 [n], and one for each other worker to be filled."""
        own = torch.tensor([flags, self._status, self.plan.fingerprint, *self._must_match.values()])
        return {
            worker: own if worker == self._job.rank else torch.empty_like(own)
            for worker in range(self._job.world_size)
        }

    def _check(self, headers: Mapping[int, Tensor]) -> None:
        own = headers[self._job.rank]
        if own[1] != _FINE or any(not torch.equal(header[1:], own[1:]) for header in headers.values()):
            self._settle()

    def _settle(self) -> None:
        """Exchange errors and descriptions, and raise unless all workers have the same and none failed."""
        self.is_over = True
        agree(self._job, self._described, where=self.where, error=self._error)
        if self._status != _CHANGED:
            raise DisagreementError(f"{self.where}: workers differ, and none of them can say in what")

    def _post(self, rows: Mapping[int, Sequence[Tensor]], what: str) -> Pending:
        """Send this worker's tensors to all others, and fill theirs."""
        outgoing = dict.fromkeys(self._others, rows[self._job.rank])
        incoming = {worker: rows[worker] for worker in self._others}
        return self._job.transport.post(outgoing, incoming, f"{self.where}, {what}")
