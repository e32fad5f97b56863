"""Partial sums across workers: every worker ends with the same average, bit for bit.

A worker owns one shard of every bucket. For each bucket, workers send each other the shards of their
subtrees, each finishes the canonical tree on its own shard and divides once by the total weight, and
then all send each other the finished shards. No arithmetic happens in the network, and where W divides T
into runs of a power of two the bytes moved are those of a ring all-reduce. A small bucket is not worth a
second round: everyone sends all of it, and finishes the whole tree.

Sparse gradients are in no bucket; they travel at the end of the step (`gathering.py`). A model without
parameters that may have them sends nothing for them.

With the first bucket travel the figures, a few facts that must be the same on every worker, and a number
whose bits are wishes, such as to stop after this step (`interruption.py`). A worker that met an error sends
its first bucket all the same, unfilled, with the error among the facts. So everyone learns of it, raises,
and nobody waits for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.summation.buckets import REFUSED, Bucket, BucketMemory, pack, unpack
from samestep.summation.placement import Placement
from samestep.summation.sparse import SparseParameter
from samestep.summation.sparse_exchange import Gathering
from samestep.summation.tree import Gradients, TreeSum, divide, subtrees
from samestep.workers.agreement import agree
from samestep.workers.job import Job
from samestep.workers.transport import Swap, Transport

__all__ = ["Exchange", "FigureSizes", "Figures", "Node"]

Node = tuple[range, Gradients]
"""A subtree of the canonical tree, as the towers under it, and its sum."""


@dataclass(frozen=True)
class Figures:
    """What is small enough for every worker to hold whole.

    Attributes:
        weights: float64 [T].
        loss_sums: float64 [T, K].
        counters: float64 [T, C].
        totals: float64 [S], sums over all towers along the canonical tree.
        weight: float64 0-dim, the sum of the towers' weights.
        divisor: the same, but 1 where that is 0, so that what nobody used is not told as NaN.
        wishes: the bits that any worker had set.
    """

    weights: Tensor
    loss_sums: Tensor
    counters: Tensor
    totals: Tensor
    weight: Tensor
    divisor: Tensor
    wishes: int


@dataclass(frozen=True)
class FigureSizes:
    """How many numbers travel beside a tower's weight and loss sums: C, and the most that S can be."""

    num_counters: int
    max_moments: int


class Exchange:
    """The exchange of one model's gradients, step by step.

    A step is `begin`, then `figures`, then `bucket` for each bucket in order, then `sparse_gradients` where
    the model has such parameters, then `finish`. Everything but `finish` only starts what can be started;
    all workers start the same things in the same order.

    Args:
        job: of this worker.
        placement: which towers each worker runs.
        parameters: those that get gradients, by name.
        buckets: at least one; all parameters but those in `sparse`.
        sizes: of the figures.
        sparse: parameters whose gradients may be sparse.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        parameters: Mapping[str, Tensor],
        buckets: Sequence[Bucket],
        sizes: FigureSizes,
        sparse: Sequence[SparseParameter] = (),
    ) -> None:
        self.names = list(parameters)
        self.buckets = buckets
        self.sparse = sparse
        self._job = job
        self._placement = placement
        self._parameters = list(parameters.values())
        self._sizes = sizes
        self._transport = Transport(job)
        self._spans = [subtrees(towers, placement.num_towers) for towers in placement.ranges()]
        self._memory: dict[Bucket, BucketMemory] = {}
        self._step = _Step("", {}, None, 1, int)

    def begin(
        self,
        step: int,
        facts: Mapping[str, int],
        error: Exception | None = None,
        *,
        num_counts: int = 0,
        wishes: Callable[[], int] = int,
    ) -> None:
        """Start a step with `facts`, numbers that must be the same on every worker.

        Args:
            step: its number.
            facts: by name.
            error: what this worker has met.
            num_counts: how many sums a loss has whose counts are exchanged first; 0 where it is one sum.
            wishes: asked once, when the first bucket goes, for the bits that this worker sets.

        Raises:
            Exception: `error`, once the others know of it.
        """
        self._step = _Step(f"step {step}", {"step": step, **facts}, error, max(1, num_counts), wishes)
        if error is not None and self._job.world_size > 1 and num_counts:
            self.counts(torch.zeros(len(self._placement.towers(self._job.rank)), num_counts).double())
        elif error is not None and self._job.world_size > 1:
            self._step.figures[self._job.rank] = self._room_for_figures(self._job.rank)
            self._post(self.buckets[0], [True] * len(self.buckets[0].parameters))
            self.wait_for_figures()
        if error is not None:
            raise error

    @property
    def has_sent(self) -> bool:
        """Whether something of this step travels already, so that it is too late to begin with an error."""
        return bool(self._step.under_way)

    # ---- numbers -----------------------------------------------------------------------------------

    def counts(self, counts: Tensor) -> Tensor:
        """Return what all towers count, float64 [T, C], given this worker's, once all workers agree.

        Raises:
            DisagreementError: facts differ, or another worker met an error.
            Error: the one that this worker met.
        """
        # The facts stand beside each tower's counts, so that one message tells both.
        facts = self._step.facts_sent.double()
        found = self.gather(torch.cat([counts, facts.expand(len(counts), -1)], dim=1), "counts")
        if any(not torch.equal(row, facts) for row in found[:, counts.shape[1] :]):
            self._disagree()
        return found[:, : counts.shape[1]]

    def gather(self, values: Tensor, what: str) -> Tensor:
        """Return all towers' rows, [T, ...] in tower order, given this worker's; a message of its own.

        Args:
            values: [towers of this worker, ...], on any device; alike on all workers in shape and dtype.
            what: names them if a worker is lost.
        """
        sizes = [len(towers) for towers in self._placement.ranges()]
        return self._transport.gather(values, sizes, f"{self._step.where}, {what}")

    def _disagree(self) -> None:
        agree(self._job, self._step.facts, where=self._step.where, error=self._step.error)

    def figures(self, scalars: Tensor, nodes: Sequence[tuple[range, Tensor]]) -> None:
        """Note this worker's scalars (float64 [towers, 1 + K + C]) and partial sums (each [S])."""
        self._step.num_moments = len(nodes[0][1])
        missing = self._sizes.max_moments - self._step.num_moments  # as many everywhere, whatever goes wrong
        partials = [torch.nn.functional.pad(value, (0, missing)) for _, value in nodes]
        self._step.figures[self._job.rank] = [scalars, torch.stack(partials)]

    def wait_for_figures(self) -> Figures:
        """Return the figures of all towers, once it is clear that all workers agree.

        Raises:
            DisagreementError: facts differ, or another worker met an error.
            Error: the one that this worker met.
        """
        step = self._step
        if step.known is None:
            step.under_way[0].swap.wait()
            if any(not torch.equal(numbers[1:], step.facts_sent[1:]) for numbers in step.facts_received):
                self._disagree()
            scalars = torch.cat([step.figures[worker][0] for worker in range(self._job.world_size)])
            partials = {w: sums[:, : step.num_moments] for w, (_, sums) in step.figures.items()}
            weights, loss_sums, counters = scalars.split([1, step.num_sums, self._sizes.num_counters], dim=1)
            totals, weight = self._finish_tree(partials), weights.sum()
            divisor = torch.where(weight == 0, 1, weight)
            wishes = reduce(
                or_, (int(numbers[0]) for numbers in step.facts_received), int(step.facts_sent[0])
            )
            step.known = Figures(weights[:, 0], loss_sums, counters, totals, weight, divisor, wishes)
        return step.known

    def _finish_tree(self, partials: Mapping[int, Tensor]) -> Tensor:
        """Add all workers' subtrees, row by row, in the canonical order.

        Works in place, and so that the sum ends in this worker's own memory, where it is wanted.
        """
        own = partials[self._job.rank].untyped_storage().data_ptr()

        def add(left: Tensor, right: Tensor) -> Tensor:
            return torch.add(left, right, out=right if right.untyped_storage().data_ptr() == own else left)

        total: TreeSum[Tensor] = TreeSum(self._placement.num_towers, add=add)
        for worker, spans in enumerate(self._spans):
            for span, row in zip(spans, partials[worker], strict=True):
                total.push(span, row)
        return total.root()

    # ---- gradients ---------------------------------------------------------------------------------

    def bucket(self, bucket: Bucket, nodes: Sequence[Node]) -> None:
        """Send one bucket's partial sums, and go on with the bucket before it."""
        used_here = [
            any(column) for column in zip(*([g is not None for g in gs] for _, gs in nodes), strict=True)
        ]
        if not self._step.under_way:
            self._step.facts_sent[0] = self._step.wishes()
        if self._job.world_size == 1:
            ((_, gradients),) = nodes
            self._step.under_way.append(_BucketUnderWay(bucket, used_here, Swap(), gradients))
            return
        if self._step.under_way:
            self._send_averages(self._step.under_way[-1])
        memory = self._memory_of(bucket)
        for row, places, (_, gradients) in zip(memory.rows, memory.places, nodes, strict=True):
            pack(bucket, row, places, gradients)
        for position, index in enumerate(bucket.parameters):
            if index in self._step.refused:
                memory.rows[0, bucket.flags + position] = REFUSED
                memory.places[0][position].fill_(REFUSED)
        self._post(bucket, used_here)

    def refuse_sparse(self, index: int) -> None:
        """Note, before its bucket is sent, that a parameter has a sparse gradient and should not."""
        self._step.refused.add(index)

    def sparse_gradients(self, nodes: Sequence[Node]) -> None:
        """Note this worker's partial sums of the parameters in `sparse`, coalesced; after all buckets."""
        self._step.sparse_sums = [gradients for _, gradients in nodes]

    def finish(self) -> Iterator[tuple[int, Tensor | None]]:
        """Wait for everything; yield (parameter index, averaged gradient).

        Raises:
            UsageError: a parameter that is in a bucket got a sparse gradient.
        """
        weight = self.wait_for_figures().divisor
        sums = Gathering(self._job, self._transport, self.sparse, self._spans, self._step.sparse_sums)
        if self.sparse:
            sums.post_sizes(self._step.where)
        if self._job.world_size > 1:
            self._send_averages(self._step.under_way[-1])
        if self.sparse:
            sums.post_rows(self._step.where)
        # Taken off, so that no gradient lives here once the caller has let go of it.
        under_way, self._step.under_way, self._step.sparse_sums = self._step.under_way, [], []
        for each in under_way:
            each.swap.wait()
        sums.wait()
        self._check_refused([each.bucket for each in under_way])
        for each in under_way:
            yield from self._averages(each, weight)
        if self.sparse:
            yield from sums.averages(self._placement.num_towers, weight)

    def _averages(self, each: _BucketUnderWay, weight: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        if self._job.world_size > 1:
            memory = self._memory[each.bucket]
            yield from unpack(each.bucket, memory.rows[0], memory.places[0], each.used_here)
            return
        for index, gradient in zip(each.bucket.parameters, each.gradients, strict=True):
            if gradient is not None:
                divide(gradient, weight, out=gradient)
            yield index, gradient

    def _check_refused(self, buckets: Sequence[Bucket]) -> None:
        refused = set(self._step.refused)
        # On a GPU this would wait for the device; there the others' gradients are not finite.
        if self._job.world_size > 1 and self._job.device.type == "cpu":
            for bucket in buckets:
                flags = self._memory[bucket].rows[0, bucket.flags : bucket.flags + len(bucket.parameters)]
                refused |= {bucket.parameters[position] for position in flags.isnan().nonzero()}
        if refused:
            names = ", ".join(self.names[index] for index in sorted(refused))
            raise UsageError(
                f"{self._step.where}: {names} got a sparse gradient, which was not expected: list the "
                "parameter in Towers(..., sparse_parameters=[...]), or set sparse=True on its nn.Embedding "
                "or nn.EmbeddingBag before Towers is made"
            )

    def _post(self, bucket: Bucket, used_here: list[bool]) -> None:
        """Send a bucket's partial sums; with the first, the facts and figures."""
        memory, step = self._memory_of(bucket), self._step
        outgoing = {worker: list(memory.partials_for(worker)) for worker in self._transport.others}
        incoming = {worker: list(memory.arrived[worker]) for worker in self._transport.others}
        if not step.under_way:
            for worker in self._transport.others:
                step.facts_received.append(torch.empty_like(step.facts_sent))
                step.figures[worker] = self._room_for_figures(worker)
                outgoing[worker] = [step.facts_sent, *step.figures[self._job.rank], *outgoing[worker]]
                incoming[worker] = [step.facts_received[-1], *step.figures[worker], *incoming[worker]]
        swap = self._transport.post(outgoing, incoming, f"{step.where}, gradients")
        step.under_way.append(_BucketUnderWay(bucket, used_here, swap))

    def _room_for_figures(self, worker: int) -> list[Tensor]:
        like = torch.empty(0, dtype=torch.float64, device=self._job.device)
        num_towers, num_spans = len(self._placement.towers(worker)), len(self._spans[worker])
        return [
            like.new_zeros(num_towers, 1 + self._step.num_sums + self._sizes.num_counters),
            like.new_zeros(num_spans, self._sizes.max_moments),
        ]

    def _send_averages(self, each: _BucketUnderWay) -> None:
        """Finish the tree on this worker's shard of a bucket, divide, and send the shard to all."""
        weight = self.wait_for_figures().divisor
        each.swap.wait()
        memory, rank = self._memory[each.bucket], self._job.rank
        flat = [memory.rows[0, shard.start : shard.stop] for shard in memory.shards]
        total = self._finish_tree({**memory.arrived, rank: memory.partials_for(rank)})
        divide(total, weight, out=flat[rank])
        if not memory.is_whole:
            each.swap = self._transport.post(
                {worker: [flat[rank]] for worker in self._transport.others},
                {worker: [flat[worker]] for worker in self._transport.others},
                f"{self._step.where}, averages",
            )

    def _memory_of(self, bucket: Bucket) -> BucketMemory:
        # Kept from step to step: fresh pages for every exchange cost more than the copies into them.
        if bucket not in self._memory:
            spans = [len(spans) for spans in self._spans]
            self._memory[bucket] = BucketMemory.allocate(bucket, self._job, spans, self._parameters)
        return self._memory[bucket]


class _Step:
    """What is known and under way of one step."""

    def __init__(
        self,
        where: str,
        facts: Mapping[str, int],
        error: Exception | None,
        num_sums: int,
        wishes: Callable[[], int],
    ) -> None:
        self.where = where
        self.facts = facts
        self.error = error
        self.num_sums = num_sums
        self.wishes = wishes
        self.facts_sent = torch.tensor([0, error is not None, *facts.values()])  # the wishes come first
        self.facts_received: list[Tensor] = []
        self.figures: dict[int, list[Tensor]] = {}
        self.num_moments = 0
        self.known: Figures | None = None
        self.under_way: list[_BucketUnderWay] = []
        self.sparse_sums: list[Gradients] = []
        self.refused: set[int] = set()


@dataclass
class _BucketUnderWay:
    """A bucket between packing and averages: its partial sums, then its averages travel in `swap`."""

    bucket: Bucket
    used_here: list[bool]
    swap: Swap
    gradients: Gradients = field(default_factory=list)
