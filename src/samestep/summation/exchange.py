"""Exchanges partial sums between workers, so that all get the same averages, bit for bit.

For each bucket, workers send each other partial sums along the canonical tree, each finishes the tree on its
shard and divides once, and all send each other the results (`bucket_exchange.py`). No arithmetic happens in
the network. If each worker runs T / W towers and that is a power of two, the bytes sent are those of a ring
all-reduce.

The first bucket is sent with the scalars (`scalars.py`) and a header: numbers that must be the same on every
worker, flags, and how long the passes of the previous step took. A worker with an error or a new plan still
sends its first message, without values, and with its status in the header; after a later error, the status is
sent with its last bucket. So all workers learn of an error before any of them has an average, and none waits
for a message that is never sent.

A worker has committed to the step once it has sent its last bucket: the others may then finish without it.
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
    """Hashes that must be the same on all workers, and a description to explain a difference.

    `hash` is called when the exchange is created, the others for each header. `hash_of_passes` returns 0 on
    workers that have run no pass, and `late_hash` on those that do not know it. `hash_beside` may differ: see
    `differs_beside`.
    """

    def hash(self) -> int: ...

    def hash_beside(self) -> int: ...

    def hash_of_passes(self) -> int: ...

    def late_hash(self) -> int: ...

    def in_words(self) -> dict[str, object]: ...


class Exchange:
    """One worker's exchange in one step: call `start`, `send` for each bucket as it fills, then `finish`.

    In a step with named sums, or with a loss of the whole batch, call `compare` first. All workers post the
    same messages in the same order. Methods that wait raise `DisagreementError` if numbers that must match
    differ, or if another worker had an error.

    Args:
        job: this worker's job.
        plan: the plan that all workers have agreed on.
        must_match: numbers and names that must be the same on every worker, including "step".
        rest: hashes of all else that must be the same, and its description.
        flags: called once, when the first bucket is sent; the result is OR-ed over all workers.
        pass_ns: how long this worker's passes of the previous step took.

    Attributes:
        stopwatch: measures the passes of this step; it is paused while the exchange sends.
        differs_beside: whether losses depend on different values beside the model on some workers.
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
        self.is_over = False  # whether an error or a difference was found, on which all workers raise
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
        self._closings: list[Tensor] = []  # each worker's status with its last bucket, if there are several
        self._buckets: list[LocalBucket | SharedBucket] = []

    def compare(self, counts: Tensor) -> Tensor:
        """Gather the counts of all towers before the first pass: [own towers, K] -> [T, K], float64."""
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

        The message has the layout of the previous plan, because workers without a new plan expect that.
        """
        self._described = {**self._must_match, **plan.description}
        self._status = _CHANGED
        if self._job.world_size > 1:
            self._send_unfilled()

    def fail(self, error: BaseException) -> NoReturn:
        """Send an error to the other workers, and raise it.

        The remaining buckets are sent without values. Called again after an interrupt, it continues where it
        was, and the others get the first error.
        """
        if isinstance(error, LostWorkerError):
            self.is_over = True
        if self._job.world_size == 1 or self.is_over or self.is_committed:
            raise error
        if self._error is None:
            self._status, self._error = _FAILED, error
        try:
            self._send_error()
        except (DisagreementError, LostWorkerError):  # `error` says more, and is raised below
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
        """Send the first message without values, unless it has been sent, and check the other workers'."""
        if not self._compared:
            num_towers = len(self.plan.placement.towers(self._job.rank))
            self.compare(torch.zeros(num_towers, len(self.plan.sums), dtype=torch.float64, device="cpu"))
        if not self._buckets:
            self.send(None)
        self._wait_for_first()

    def start(self, towers: Sequence[TowerScalars]) -> None:
        """Set the scalars of all this worker's towers, which are sent with the first bucket."""
        self._scalars.put(towers)

    def send(self, nodes: Sequence[Node] | None) -> None:
        """Send this worker's subtree sums of the next bucket, and continue with the bucket before it.

        `nodes` is None if this worker had an error.
        """
        with self.stopwatch.paused():
            self._send(nodes)

    def _send(self, nodes: Sequence[Node] | None) -> None:
        bucket = self.plan.buckets[len(self._buckets)]
        is_last = len(self._buckets) + 1 == len(self.plan.buckets)
        extra: list[list[Tensor]] = [[] for _ in range(self._job.world_size)]
        if not self._buckets:
            flags = 0 if nodes is None else self._ask_flags()
            self._headers = self._for_all([flags, self._pass_ns, *self._header])
            extra = [[header, *self._scalars.of(worker)] for worker, header in enumerate(self._headers)]
        else:
            self._average(self._buckets[-1])
            if is_last:
                self._closings = self._for_all([self._status])
                extra = [[closing] for closing in self._closings]
        self.is_committed = is_last and self._status == _FINE and self._job.world_size > 1
        made: LocalBucket | SharedBucket
        if nodes is not None and self._job.world_size == 1:
            made = LocalBucket(bucket, nodes)
        else:
            made = SharedBucket(self._job, self.plan, bucket, nodes)
        with self.unbroken():
            made.post(extra, f"{self.where}, gradients")
            self._buckets.append(made)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Mark the step as impossible to undo if the block is interrupted: some messages may be missing.

        Any exception except a samestep `Error` counts as an interrupt, because signal handlers may raise
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
        """Wait for all messages, and return this worker's averages.

        `sparse_sums` has the gradients of `plan.sparse` for each of this worker's subtrees.
        """
        divisor = self.scalars.divisor
        self._wait_for_last()
        sparse = SparseExchange(self._job, self.plan, sparse_sums, self.where) if self.plan.sparse else None
        self._average(self._buckets[-1])
        averages = sparse.finish(divisor) if sparse else []
        # Not kept here, so that a gradient is freed once the caller drops it.
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.wait()
        return [*(each for bucket in buckets for each in bucket.averages()), *averages]

    @property
    def scalars(self) -> Scalars:
        """The scalars of all towers. The first access waits for them, and checks that all workers agree."""
        if self._known is None:
            self._wait_for_first()
            self._known = self._scalars.result()
        return self._known

    @property
    def flags(self) -> int:
        """The OR of all workers' flags; read `scalars` first."""
        return reduce(or_, (int(header[0]) for header in self._headers))

    @property
    def pass_ns(self) -> list[int]:
        """How long each worker's passes of the previous step took; read `scalars` first."""
        return [int(header[1]) for header in self._headers]

    def _average(self, bucket: LocalBucket | SharedBucket) -> None:
        bucket.average(self.scalars.divisor)
        with self.unbroken():
            bucket.send_averages(f"{self.where}, averages")

    def _wait_for_first(self) -> None:
        self._buckets[0].wait()
        self._check(self._headers)

    def _wait_for_last(self) -> None:
        self._buckets[-1].wait()
        if any(int(closing) != _FINE for closing in self._closings):
            self._settle()

    @property
    def _header(self) -> list[int]:
        beside, late, of_passes = 0, 0, 0
        if self._rest is not None:
            beside, late = self._rest.hash_beside(), self._rest.late_hash()
            of_passes = self._rest.hash_of_passes()
        own = [v if isinstance(v, int) else zlib.crc32(v.encode()) for v in self._must_match.values()]
        return [self._status, self.plan.fingerprint, *own, self._hash_of_rest, beside, late, of_passes]

    def _for_all(self, own: Sequence[int]) -> list[Tensor]:
        """Return a tensor for each worker, int64 [n]: this worker's numbers, and memory for the others'."""
        numbers = torch.tensor(own, device="cpu")
        all_numbers = [torch.empty_like(numbers) for _ in range(self._job.world_size)]
        all_numbers[self._job.rank] = numbers
        return all_numbers

    def _check(self, headers: Sequence[Tensor]) -> None:
        columns = zip(*(header[2:].tolist() for header in headers), strict=True)
        status, *same, beside, late, of_passes = map(set, columns)
        self.differs_beside = len(beside) > 1
        # 0 is unknown: for passes, because that worker has run none yet.
        values = [*same, late - {0}, of_passes - {0}]
        if status != {_FINE} or max(map(len, values)) > 1:
            self._settle()

    def _settle(self) -> None:
        """Exchange errors and descriptions; raise if a worker failed, or if descriptions differ."""
        with self.unbroken():
            self.is_over = True
            rest = {} if self._rest is None else self._rest.in_words()
            agree(self._job, {**self._described, **rest}, where=self.where, error=self._error)
        if self._status != _CHANGED:
            raise DisagreementError(
                f"{self.where}: workers differ, but the difference could not be identified: expected the "
                "same model, batch and settings on all workers"
            )
