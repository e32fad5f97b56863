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
from samestep.summation.sparse import SparseParameter
from samestep.summation.tree import Gradients, TreeSum, add_gradients, divide
from samestep.workers.job import Job
from samestep.workers.transport import Swap, Transport

__all__ = ["Gathering"]


class Gathering:
    """One step's sparse gradients: `post_sizes`, `post_rows`, `wait`, `averages`, on all workers alike.

    Args:
        job: of this worker.
        transport: moves the messages.
        parameters: those whose gradients may be sparse.
        spans: each worker's subtrees.
        sums: this worker's: for each of its subtrees, a gradient for each of the parameters.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        parameters: Sequence[SparseParameter],
        spans: Sequence[Sequence[range]],
        sums: Sequence[Gradients],
    ) -> None:
        self._job = job
        self._transport = transport
        self._parameters = parameters
        self._spans = spans
        self._sums: dict[int, Sequence[Gradients]] = {job.rank: sums}
        self._sizes: dict[int, Tensor] = {}
        self._swap = Swap()

    def post_sizes(self, where: str) -> None:
        """Start to tell everyone how much each of this worker's partial sums stores."""
        sizes = [
            [sparse.measure(gradient) for gradient in gradients] for gradients in self._sums[self._job.rank]
        ]
        for worker in self._transport.others:
            self._sizes[worker] = torch.empty(
                len(self._spans[worker]), len(self._parameters), 2, dtype=torch.int64
            )
        incoming = {worker: [room] for worker, room in self._sizes.items()}
        self._post([torch.tensor(sizes)], incoming, f"{where}, sizes of sparse gradients")

    def post_rows(self, where: str) -> None:
        """Start to send this worker's partial sums to everyone, once it is known what will arrive."""
        self._swap.wait()
        for worker, sizes in self._sizes.items():
            self._sums[worker] = [self._room(row) for row in sizes.tolist()]
        incoming = {worker: _parts(self._sums[worker]) for worker in self._sizes}
        self._post(_parts(self._sums[self._job.rank]), incoming, f"{where}, sparse gradients")

    def wait(self) -> None:
        """Wait until all partial sums have arrived."""
        self._swap.wait()

    def averages(self, num_towers: int, weight: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Finish the tree, divide once, and yield (parameter index, averaged gradient)."""
        total: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        for worker, spans in enumerate(self._spans):
            for span, gradients in zip(spans, self._sums.pop(worker), strict=True):
                total.push(span, gradients)
        for parameter, gradient in zip(self._parameters, total.root(), strict=True):
            if gradient is not None:
                divide(sparse.stored(gradient), weight, out=sparse.stored(gradient))
            yield parameter.index, gradient

    def _post(self, parts: Sequence[Tensor], incoming: Mapping[int, Sequence[Tensor]], what: str) -> None:
        outgoing = dict.fromkeys(self._transport.others, parts)
        self._swap = self._transport.post(outgoing, incoming, what)

    def _room(self, sizes: Sequence[sparse.Size]) -> Gradients:
        return [
            sparse.room(parameter, size, self._job.device)
            for parameter, size in zip(self._parameters, sizes, strict=True)
        ]


def _parts(sums: Sequence[Gradients]) -> list[Tensor]:
    return [part for gradients in sums for gradient in gradients for part in sparse.parts(gradient)]
