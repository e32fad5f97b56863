"""Moving tensors between workers: point to point, so that nothing is added on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import LostWorkerError
from samestep.job import Job

__all__ = ["Transport"]

Result = TypeVar("Result")


class Transport:
    """Swaps tensors with the other workers, while the main thread computes.

    Every worker posts the same swaps in the same order. On gloo they run in one background thread,
    because its waits block; NCCL's are ordered by the GPU's stream, so they are posted on the spot.

    A swap is an all-to-all or an all-gather, depending on what is sent; gloo's own `all_gather` copies
    more and took about twice the time of the sends and receives that it is made of.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        backend = dist.get_backend_config() if job.world_size > 1 else ""
        self._through_host = job.device.type == "cuda" and "nccl" not in backend
        blocking = job.world_size > 1 and "nccl" not in backend
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samestep-exchange") if blocking else None

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Run `task` after all tasks submitted before; its result or error is the future's."""
        if self._thread is not None:
            return self._thread.submit(task)
        future: Future[Result] = Future()
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        return future

    def swap(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> None:
        """Send to and receive from every other worker, and wait until both are done.

        Args:
            outgoing: for each other worker, contiguous tensors to send, in order.
            incoming: for each other worker, contiguous tensors to fill, in order.
            what: names the exchange in the message if a worker is lost.

        Raises:
            LostWorkerError: a worker is gone or did not answer within the job's timeout.
        """
        if self._through_host:
            on_host = {worker: [t.cpu() for t in tensors] for worker, tensors in incoming.items()}
            self._swap({w: [t.cpu() for t in tensors] for w, tensors in outgoing.items()}, on_host, what)
            for worker, tensors in incoming.items():
                torch._foreach_copy_(list(tensors), on_host[worker])
        else:
            self._swap(outgoing, incoming, what)

    def _swap(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> None:
        operations, peers = [], []
        for distance in range(1, self._job.world_size):
            source = (self._job.rank - distance) % self._job.world_size
            target = (self._job.rank + distance) % self._job.world_size
            operations += [dist.P2POp(dist.irecv, t, source) for t in incoming[source] if t.numel()]
            operations += [dist.P2POp(dist.isend, t, target) for t in outgoing[target] if t.numel()]
            peers += [source] * sum(t.numel() > 0 for t in incoming[source])
            peers += [target] * sum(t.numel() > 0 for t in outgoing[target])
        if not operations:
            return
        peer = -1
        try:
            works = dist.batch_isend_irecv(operations)
            for position, work in enumerate(works):
                peer = peers[position] if len(works) == len(peers) else -1
                work.wait()
        except RuntimeError as error:
            raise LostWorkerError(self._explain(peer, what, error)) from error

    def _explain(self, peer: int, what: str, error: RuntimeError) -> str:
        who = f"worker {peer}" if peer >= 0 else "another worker"
        why = str(error).partition("\n")[0]
        return f"{what}: {who} is gone or did not answer within {self._job.timeout_s:g} s ({why})"
