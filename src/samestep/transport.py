"""Moving tensors between workers: point to point, so that nothing is added on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import LostWorkerError
from samestep.job import Job

__all__ = ["Swap", "Transport"]

Tensors = Mapping[int, Sequence[Tensor]]
"""For each other worker, contiguous tensors in the order they are sent in."""


@dataclass
class Swap:
    """Sends and receives that are under way; nothing may touch their tensors before `wait` returns."""

    what: str = ""
    timeout_s: float = 0.0
    works: list[dist.Work] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until everything has been sent and has arrived; on NCCL, until the GPU's stream has.

        Raises:
            LostWorkerError: a worker is gone or did not answer within the job's timeout.
        """
        for position, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL hands out one work for all of a batch, which names nobody.
                peer = self.peers[position] if len(self.works) == len(self.peers) else None
                raise self.lost(error, peer) from error
        for target, host in self.staged:
            target.copy_(host)
        self.works.clear()
        self.staged.clear()

    def lost(self, error: RuntimeError, peer: int | None = None) -> LostWorkerError:
        """Return the error that says who did not take part in what."""
        who = "another worker" if peer is None else f"worker {peer}"
        why = str(error).partition("\n")[0]
        return LostWorkerError(f"{self.what}: {who} is gone or silent for {self.timeout_s:g} s ({why})")


class Transport:
    """Swaps tensors with the other workers; every worker posts the same swaps in the same order.

    A swap is an all-to-all or an all-gather, depending on what is sent. It is made of sends and
    receives because gloo's own `all_gather` takes about twice the time of those it consists of, and
    because these run in gloo's thread while this one computes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        backend = dist.get_backend_config() if job.world_size > 1 else ""
        self._through_host = job.device.type == "cuda" and "nccl" not in backend
        self.others = [worker for worker in range(job.world_size) if worker != job.rank]

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Swap:
        """Start to send to and receive from every other worker.

        Args:
            outgoing: what to send.
            incoming: what to fill.
            what: names the exchange in the message if a worker is lost.

        Raises:
            LostWorkerError: a worker is gone.
        """
        swap = Swap(what, self._job.timeout_s)
        operations: list[dist.P2POp] = []
        for distance in range(1, self._job.world_size):
            source = (self._job.rank - distance) % self._job.world_size
            target = (self._job.rank + distance) % self._job.world_size
            for tensor in incoming[source]:
                self._add(swap, operations, dist.irecv, self._to_fill(swap, tensor), source)
            for tensor in outgoing[target]:
                self._add(swap, operations, dist.isend, self._to_send(tensor), target)
        for device_type in ("cpu", "cuda"):  # a batch goes to one backend
            batch = [operation for operation in operations if operation.tensor.device.type == device_type]
            try:
                swap.works += dist.batch_isend_irecv(batch) if batch else []
            except RuntimeError as error:
                raise swap.lost(error) from error
        return swap

    @staticmethod
    def _add(
        swap: Swap, operations: list[dist.P2POp], operation: Callable[..., object], tensor: Tensor, peer: int
    ) -> None:
        if tensor.numel():
            operations.append(dist.P2POp(operation, tensor, peer))
            swap.peers.append(peer)

    def _to_fill(self, swap: Swap, tensor: Tensor) -> Tensor:
        if not self._through_host or tensor.device.type == "cpu":
            return tensor
        host = torch.empty_like(tensor, device="cpu")
        swap.staged.append((tensor, host))
        return host

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._through_host else tensor
