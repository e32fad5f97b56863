"""The exchange of sparse gradients: all workers get all partial sums, and each finishes the whole tree.

The size of a sparse gradient is known only after backward. So a step takes two rounds of messages: the number
of rows in each worker's sums, then the rows. There are no shards, because workers do not know each other's
rows. The size of the messages depends on the rows that all towers used, not on the size of the parameter,
unless a tower's gradient is dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.summation import sparse
from samestep.summation.buckets import Average
from samestep.summation.gradients import Gradients, add_gradients, divide
from samestep.summation.plan import Plan
from samestep.summation.tree import join
from samestep.workers.collectives import post_to_all
from samestep.workers.job import Job

__all__ = ["SparseExchange"]


class SparseExchange:
    """The exchange of one step's sparse gradients; all workers must create it and call `finish`.

    The constructor starts the first round, so that it runs while the last bucket is averaged.
    """

    def __init__(self, job: Job, plan: Plan, sums: Sequence[Gradients], where: str) -> None:
        self._job = job
        self._plan = plan
        self._sums = [*sums]  # for each of this worker's subtrees, the gradients of `plan.sparse`
        self._what = f"{where}, sparse gradients"
        self._sizes = [
            torch.zeros(len(spans), len(plan.sparse), 2, dtype=torch.int64, device="cpu")
            for spans in plan.spans
        ]
        self._sizes[job.rank] = torch.tensor(
            [[sparse.measure(g) for g in gradients] for gradients in sums], device="cpu"
        )
        self._pending = post_to_all(job.transport, [[table] for table in self._sizes], self._what)

    def finish(self, divisor: Tensor) -> list[Average]:
        """Finish the tree, divide once, and return the averages."""
        self._pending.wait()
        sums = [[self._memory(row) for row in table.tolist()] for table in self._sizes]
        sums[self._job.rank], self._sums = self._sums, []
        post_to_all(self._job.transport, [_tensors(each) for each in sums], self._what).wait()
        one_by_one = (sums.pop(0) for _ in self._plan.spans)  # frees each worker's sums once they are added
        averages = join(self._plan.spans, one_by_one, self._plan.placement.num_towers, add_gradients)
        for gradient in averages:
            if gradient is not None:
                divide(sparse.stored(gradient), divisor, out=sparse.stored(gradient))
        pairs = zip(self._plan.sparse, averages, strict=True)
        return [Average(index, 0, gradient) for index, gradient in pairs]

    def _memory(self, sizes: Sequence[sparse.Size]) -> Gradients:
        layouts = [self._plan.parameters[index].gradient for index in self._plan.sparse]
        return [
            sparse.empty(layout, size, self._job.device) for layout, size in zip(layouts, sizes, strict=True)
        ]


def _tensors(sums: Sequence[Gradients]) -> list[Tensor]:
    return [part for gradients in sums for gradient in gradients for part in sparse.tensors_of(gradient)]
