"""Sparse gradients across workers: all get all partial sums, and each finishes the whole tree.

How much a sparse gradient stores is only known when backward has run. So a step takes two rounds of
messages: how many rows each worker's subtrees store, then the rows. There are no shards, because workers do
not know of each other which rows they have. What each receives grows with the rows that all towers used,
never with the size of the parameter, unless a tower's gradient is dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from samestep.summation import sparse
from samestep.summation.gradients import Gradients, add_gradients, divide
from samestep.summation.plan import Plan
from samestep.summation.tree import TreeSum
from samestep.workers.job import Job
from samestep.workers.transport import Alone, Pending

__all__ = ["SparseExchange"]

_FAILED = -2
"""Stands for sizes where a worker met an error."""


class SparseExchange:
    """One step's sparse gradients: made, then `gradients`, on all workers alike.

    Making it starts the first round, so that it runs beside the last bucket's averages.

    Args:
        job: of this worker.
        plan: of the step.
        sums: for each of this worker's subtrees, a gradient for each of `plan.sparse`; None where it met an
            error.
        where: names the step if a worker is lost.

    Attributes:
        has_failed: whether some worker met an error, once `gradients` has been read.
    """

    def __init__(self, job: Job, plan: Plan, sums: Sequence[Gradients] | None, where: str) -> None:
        self._job = job
        self._plan = plan
        self._where = where
        self._layouts = [plan.parameters[index].gradient for index in plan.sparse]
        self._sums: dict[int, Sequence[Gradients]] = {job.rank: sums or []}
        self._others = [worker for worker in range(job.world_size) if worker != job.rank]
        self.has_failed = sums is None and bool(plan.sparse)
        self._pending: Pending = Alone().post({}, {}, "")
        self._sizes: dict[int, Tensor] = {}
        if plan.sparse:
            self._post_sizes()

    def _post_sizes(self) -> None:
        tables = [torch.full((len(spans), len(self._layouts), 2), _FAILED) for spans in self._plan.spans]
        for table, gradients in zip(tables[self._job.rank], self._sums[self._job.rank], strict=False):
            table.copy_(torch.tensor([sparse.measure(gradient) for gradient in gradients]))
        self._sizes = {worker: tables[worker] for worker in self._others}
        incoming = {worker: [table] for worker, table in self._sizes.items()}
        self._pending = self._post([tables[self._job.rank]], incoming, "sizes of sparse gradients")

    def gradients(self, divisor: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Finish the tree, divide once, and yield (parameter index, averaged gradient)."""
        self._pending.wait()
        self.has_failed |= any(bool((table == _FAILED).any()) for table in self._sizes.values())
        if self.has_failed or not self._layouts:
            return
        for worker, table in self._sizes.items():
            self._sums[worker] = [self._memory(row) for row in table.tolist()]
        incoming = {worker: _tensors(self._sums[worker]) for worker in self._others}
        self._post(_tensors(self._sums[self._job.rank]), incoming, "sparse gradients").wait()
        for index, gradient in zip(self._plan.sparse, self._finish_tree(), strict=True):
            if gradient is not None:
                divide(sparse.stored(gradient), divisor, out=sparse.stored(gradient))
            yield index, gradient

    def _finish_tree(self) -> Gradients:
        total: TreeSum[Gradients] = TreeSum(self._plan.placement.num_towers, add=add_gradients)
        for worker, spans in enumerate(self._plan.spans):
            for span, gradients in zip(spans, self._sums.pop(worker), strict=True):
                total.push(span, gradients)
        return total.root()

    def _post(self, own: Sequence[Tensor], incoming: Mapping[int, Sequence[Tensor]], what: str) -> Pending:
        outgoing = dict.fromkeys(self._others, own)
        return self._job.transport.post(outgoing, incoming, f"{self._where}, {what}")

    def _memory(self, sizes: Sequence[sparse.Size]) -> Gradients:
        return [
            sparse.empty(layout, size, self._job.device)
            for layout, size in zip(self._layouts, sizes, strict=True)
        ]


def _tensors(sums: Sequence[Gradients]) -> list[Tensor]:
    return [part for gradients in sums for gradient in gradients for part in sparse.tensors_of(gradient)]
