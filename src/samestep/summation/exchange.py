"""Partial sums across workers: every worker ends with the same average, bit for bit.

For each bucket, workers send each other partial sums along the canonical tree, each finishes the tree on its
share and divides once, and all send each other the results (`bucket_exchange.py`). No arithmetic happens in
the network, and where W divides T into runs of a power of two the bytes moved are those of a ring all-reduce.

The first bucket carries the scalars (`scalars.py`) and a header: numbers that must be the same on every
worker, flags, and how long the passes of the step before took. A worker that met an error, or that has a new
plan, still sends its first message, unfilled, and says so in the header; one that met an error later says so
beside its last bucket. So all workers learn of it before any of them has an average, and none waits for a
message that never comes.

A worker has committed to the step once it has sent its last bucket: others may then finish without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from samestep.errors import DisagreementError, Error, LostWorkerError
from samestep.summation.bucket_exchange import LocalBucket, Node, SharedBucket
from samestep.summation.buckets import Average
from samestep.summation.gradients import Gradients
from samestep.summation.plan import Plan
from samestep.summation.scalars import ScalarExchange, Scalars, TowerScalars
from samestep.summation.sparse_exchange import SparseExchange
from samestep.workers.agreement import agree
from samestep.workers.collectives import post_to_all
from samestep.workers.job import Job
from samestep.workers.stopwatch import Stopwatch

__all__ = ["Exchange"]

_FINE, _FAILED, _CHANGED = range(3)
"""A worker's status, in its header."""


class MustMatch(Protocol):
    """Hashes that must be the same on all workers, and a description to explain how they differ.

    `hash` is called when the exchange is made, the others when a message is made that compares them.
    `hash_of_passes` is 0 on workers that have run no pass. `hash_beside` may differ: see `differs_beside`.
    """

    def hash(self) -> int: ...

    def hash_beside(self) -> int: ...

    def hash_of_passes(self) -> int: ...

    def in_words(self) -> dict[str, object]: ...


class Exchange:
    """One step's exchange of one worker: `start`, `send` for each bucket as it fills, `finish`.

    In a step with sums to count, or of the whole batch, `compare` comes first. Everything but `compare` and
    `finish` only starts what can be started; all workers start the same things in the same order. Methods
    that wait raise `DisagreementError` if numbers that must match differ, or another worker met an error.

    Args:
        job: of this worker.
        plan: that all workers have agreed on.
        must_match: numbers and names that must be the same on every worker, "step" among them.
        rest: what else must be the same; its description explains a difference.
        flags: called once, when the first bucket is sent; its bits are OR-ed over all workers.
        pass_ns: how long this worker's passes of the step before took.

    Attributes:
        stopwatch: for the passes of this step; it stands still while the exchange sends.
        differs_beside: whether losses depend on other values beside the model on some worker, or on more.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        must_match: Mapping[str, int | str],
        *,
        rest: MustMatch | None = None,
        flags: Callable[[], int] = int,
        pass_ns: int = 0,
    ) -> None:
        self.plan = plan
        self.stopwatch = Stopwatch(job.device)
        self.where = f"step {must_match['step']}"
        self.is_over = False  # whether the workers found an error or a difference; then all of them raise
        self.is_committed = False
        self.differs_beside = False
        self._job = job
        self._must_match = must_match
        self._ask_flags = flags
        self._pass_ns = pass_ns
        self._described: Mapping[str, object] = {**must_match, **plan.description}
        self._rest = None if job.world_size == 1 else rest
        self._hash_of_rest = 0 if self._rest is None else self._rest.hash()
        self._status = _FINE
        self._error: BaseException | None = None
        self._compared = not (plan.sums or plan.is_whole_batch)
        self._scalars = ScalarExchange(job, plan)
        self._known: Scalars | None = None
        self._headers: list[Tensor] = []
        self._closings: list[Tensor] = []  # each worker's status when it sent its last of several buckets
        self._buckets: list[LocalBucket | SharedBucket] = []

    def compare(self, counts: Tensor) -> Tensor:
        """Return what all towers count, float64 [T, K], given this worker's, before the first pass."""
        tables = [counts.new_empty(len(own), counts.shape[1]) for own in self.plan.placement.ranges]
        tables[self._job.rank] = counts
        headers = self._for_all([0, 0, *self._header])
        rows = list(zip(headers, tables, strict=True))
        with self.unbroken():
            post_to_all(self._job.transport, rows, f"{self.where}, counts").wait()
            self._compared = True
            self._check(headers)
        return torch.cat(tables)

    def change_to(self, plan: Plan) -> None:
        """Agree on a new plan, or raise `DisagreementError` on all workers.

        The message has the layout of the previous plan, which workers that kept it expect.
        """
        self._described = {**self._must_match, **plan.description}
        self._status = _CHANGED
        if self._job.world_size > 1:
            self._send_unfilled()

    def fail(self, error: BaseException) -> NoReturn:
        """Send the other workers an error, instead of what they wait for, and raise it.

        Buckets that are still to be sent are sent unfilled. Called again after an interrupt, it continues
        where it was, and the others get the first error.
        """
        if isinstance(error, LostWorkerError):
            self.is_over = True
        if self._job.world_size == 1 or self.is_over or self.is_committed:
            raise error
        if self._error is None:
            self._status, self._error = _FAILED, error
        try:
            self._send_error()
        except (DisagreementError, LostWorkerError):  # the error on this worker says more
            self.is_over = True
        except BaseException as raised:
            if raised is not self._error:
                raise
        raise error

    def _send_error(self) -> None:
        if self._known is None:
            self._send_unfilled()
        while len(self._buckets) < len(self.plan.buckets):
            self.send(None)
        self._wait_for_last()

    def _send_unfilled(self) -> None:
        """Send the first message, unless it has been sent, and check those of the others."""
        if not self._compared:
            num_towers = len(self.plan.placement.towers(self._job.rank))
            self.compare(torch.zeros(num_towers, len(self.plan.sums), dtype=torch.float64, device="cpu"))
        if not self._buckets:
            self.send(None)
        self._wait_for_first()

    def start(self, towers: Sequence[TowerScalars]) -> None:
        """Note the scalars of all this worker's towers, which travel with the first bucket."""
        self._scalars.put(towers)

    def send(self, nodes: Sequence[Node] | None) -> None:
        """Send the next bucket's sums of this worker's subtrees, and go on with the bucket before it.

        `nodes` are None where it met an error.
        """
        with self.stopwatch.paused():
            self._send(nodes)

    def _send(self, nodes: Sequence[Node] | None) -> None:
        bucket = self.plan.buckets[len(self._buckets)]
        is_last = len(self._buckets) + 1 == len(self.plan.buckets)
        beside: list[list[Tensor]] = [[] for _ in range(self._job.world_size)]
        if not self._buckets:
            flags = 0 if nodes is None else self._ask_flags()
            self._headers = self._for_all([flags, self._pass_ns, *self._header])
            beside = [[header, *self._scalars.of(worker)] for worker, header in enumerate(self._headers)]
        else:
            self._average(self._buckets[-1])
            if is_last:
                self._closings = self._for_all([self._status])
                beside = [[closing] for closing in self._closings]
        self.is_committed = is_last and self._status == _FINE and self._job.world_size > 1
        made: LocalBucket | SharedBucket
        if nodes is not None and self._job.world_size == 1:
            made = LocalBucket(bucket, nodes)
        else:
            made = SharedBucket(self._job, self.plan, bucket, nodes)
        with self.unbroken():
            made.post(beside, f"{self.where}, gradients")
            self._buckets.append(made)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """After an interrupt in this block, some messages may be sent and some not: the step cannot be left.

        Any exception but the exchange's own errors counts as an interrupt: signal handlers may raise
        anything.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Error) and error is not self._error:
                self.is_committed = self._job.world_size > 1
                self._job.transport.give_up(self.where)
            raise

    def finish(self, sparse_sums: Sequence[Gradients]) -> list[Average]:
        """Wait for everything; return the averages that this worker gets.

        `sparse_sums` has, for each of this worker's subtrees, the gradients of `plan.sparse`.
        """
        divisor = self.scalars.divisor
        self._wait_for_last()
        sparse = SparseExchange(self._job, self.plan, sparse_sums, self.where) if self.plan.sparse else None
        self._average(self._buckets[-1])
        averages = sparse.finish(divisor) if sparse else []
        # Taken off, so that no gradient lives here once the caller has let go of it.
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.wait()
        return [*(each for bucket in buckets for each in bucket.averages()), *averages]

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

    @property
    def pass_ns(self) -> list[int]:
        """How long each worker's passes of the step before took, once `scalars` are there."""
        return [int(header[1]) for header in self._headers]

    def _average(self, bucket: LocalBucket | SharedBucket) -> None:
        bucket.average(self.scalars.divisor)
        with self.unbroken():
            bucket.share(f"{self.where}, averages")

    def _wait_for_first(self) -> None:
        self._buckets[0].wait()
        self._check(self._headers)

    def _wait_for_last(self) -> None:
        self._buckets[-1].wait()
        if any(int(closing) != _FINE for closing in self._closings):
            self._settle()

    @property
    def _header(self) -> list[int]:
        beside, of_passes = 0, 0
        if self._rest is not None:
            beside, of_passes = self._rest.hash_beside(), self._rest.hash_of_passes()
        own = [v if isinstance(v, int) else zlib.crc32(v.encode()) for v in self._must_match.values()]
        return [self._status, self.plan.fingerprint, *own, self._hash_of_rest, beside, of_passes]

    def _for_all(self, own: Sequence[int]) -> list[Tensor]:
        """Return this worker's numbers, int64 [n], and memory for those of each other worker."""
        numbers = torch.tensor(own, device="cpu")
        all_numbers = [torch.empty_like(numbers) for _ in range(self._job.world_size)]
        all_numbers[self._job.rank] = numbers
        return all_numbers

    def _check(self, headers: Sequence[Tensor]) -> None:
        rows = [header[2:].tolist() for header in headers]
        of_passes = {row.pop() for row in rows} - {0}  # of a worker that had none yet
        self.differs_beside = len({row.pop() for row in rows}) > 1
        expected = [_FINE, *rows[self._job.rank][1:]]
        if any(row != expected for row in rows) or len(of_passes) > 1:
            self._settle()

    def _settle(self) -> None:
        """Exchange errors and descriptions, and raise unless all workers have the same and none failed."""
        with self.unbroken():
            self.is_over = True
            rest = {} if self._rest is None else self._rest.in_words()
            agree(self._job, {**self._described, **rest}, where=self.where, error=self._error)
        if self._status != _CHANGED:
            raise DisagreementError(
                f"{self.where}: workers differ, but the difference could not be identified"
            )
