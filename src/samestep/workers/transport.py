"""Moving tensors between workers: point to point, so that nothing is added on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import LostWorkerError
from samestep.workers.job import Job, lost_worker

__all__ = ["Swap", "Transport"]

Tensors = Mapping[int, Sequence[Tensor]]
"""For each other worker, contiguous tensors in the order they are sent in."""


_SMALL_BYTES = 2**18
"""Tensors up to here are worth a copy to save a message."""


@dataclass
class Swap:
    """Sends and receives that are under way; nothing may touch their tensors before `wait` returns."""

    what: str = ""
    timeout_s: float = 0.0
    works: list[dist.Work] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    staged: list[_Parcel] = field(default_factory=list)

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
        for parcel in self.staged:
            parcel.unpack()
        self.works.clear()
        self.staged.clear()

    def lost(self, error: RuntimeError, peer: int | None = None) -> LostWorkerError:
        """Return the error that says who did not take part in what."""
        return lost_worker(
            self.what, "another worker" if peer is None else f"worker {peer}", self.timeout_s, error
        )


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
            for parcel in self._parcels(incoming[source]):
                operations.append(dist.P2POp(dist.irecv, parcel.to_fill(), source))
                swap.staged.append(parcel)
            for parcel in self._parcels(outgoing[target]):
                operations.append(dist.P2POp(dist.isend, parcel.pack(), target))
        self._start(swap, [operation for operation in operations if operation.tensor.device.type == "cpu"])
        self._start_batch(swap, [op for op in operations if op.tensor.device.type == "cuda"])
        return swap

    @staticmethod
    def _start(swap: Swap, operations: Sequence[dist.P2POp]) -> None:
        """Start operations on gloo, which takes them one by one, so that an error names the worker."""
        for operation in operations:
            try:
                swap.works.append(operation.op(operation.tensor, operation.peer))
            except RuntimeError as error:
                raise swap.lost(error, operation.peer) from error
            swap.peers.append(operation.peer)

    @staticmethod
    def _start_batch(swap: Swap, operations: list[dist.P2POp]) -> None:
        """Start operations on NCCL, which would wait for each other if they came one by one."""
        try:
            swap.works += dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise swap.lost(error) from error

    def gather(self, values: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """Return the rows of all workers, in their order, given this worker's; wait for them.

        Args:
            values: [rows, ...]; else of the same shape and dtype everywhere.
            sizes: each worker's rows.
            what: as for `post`.

        Raises:
            LostWorkerError: a worker is gone.
        """
        parts = [values.new_empty(size, *values.shape[1:]) for size in sizes]
        parts[self._job.rank] = values.contiguous()
        outgoing = {worker: [parts[self._job.rank]] for worker in self.others}
        self.post(outgoing, {worker: [parts[worker]] for worker in self.others}, what).wait()
        return torch.cat(parts)

    def _parcels(self, tensors: Sequence[Tensor]) -> list[_Parcel]:
        """Sort tensors into messages, alike on both ends: small ones of a device share one."""
        small: dict[str, list[Tensor]] = {}
        parcels = []
        for tensor in tensors:
            if tensor.nbytes > _SMALL_BYTES:
                parcels.append(_Parcel([tensor], self._through_host))
            elif tensor.numel():
                small.setdefault(tensor.device.type, []).append(tensor)
        return [*(_Parcel(group, self._through_host) for group in small.values()), *parcels]


class _Parcel:
    """Tensors that travel as one message, through host memory where the backend knows no other."""

    def __init__(self, tensors: list[Tensor], through_host: bool) -> None:
        self._tensors = tensors
        self._device = torch.device("cpu") if through_host else tensors[0].device
        self._is_plain = len(tensors) == 1 and tensors[0].device.type == self._device.type
        self._buffer = tensors[0]

    def pack(self) -> Tensor:
        """Return the message."""
        if self._is_plain:
            return self._tensors[0]
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self._tensors]).to(self._device)

    def to_fill(self) -> Tensor:
        """Return where the message should arrive."""
        if not self._is_plain:
            size = sum(tensor.nbytes for tensor in self._tensors)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer

    def unpack(self) -> None:
        """Copy the message that arrived to where it belongs."""
        if self._is_plain:
            return
        parts = self._buffer.split([tensor.nbytes for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.reshape(-1).view(torch.uint8).copy_(part)
