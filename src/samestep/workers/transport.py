"""Moving tensors between workers: point to point, so that nothing is added on the way."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import Error, LostWorkerError

__all__ = ["Alone", "Pending", "ProcessGroup", "Tensors", "Transport", "is_lost_connection", "lost_worker"]

Tensors = Mapping[int, Sequence[Tensor]]
"""For other workers, by rank: contiguous tensors in the order in which they are sent."""

_SMALL_BYTES = 2**18
"""Tensors up to here are worth a copy to save a message."""


class Pending(Protocol):
    """Messages on their way; nothing may touch their tensors before `wait` returns."""

    def wait(self) -> None:
        """Wait until everything has been sent and has arrived; on NCCL, until the GPU's stream has."""


class Transport(Protocol):
    """Sends tensors to the other workers and receives theirs.

    Between two workers, messages arrive in the order in which they were posted; each must be received with
    the sizes with which it was sent. All messages between workers go through `post`.
    """

    @property
    def rank(self) -> int:
        """This worker's number, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Workers in the job, W."""

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send `outgoing` and to fill `incoming`; `what` names it if a worker is lost."""

    def close(self) -> None:
        """Leave the job; nothing may be posted afterwards."""


@dataclass(frozen=True)
class Alone:
    """The transport of a job of one worker: nothing is sent."""

    rank: int = 0
    world_size: int = 1

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Do nothing."""
        return _Posted(what, 0.0)

    def close(self) -> None:
        """Do nothing."""


class ProcessGroup:
    """The transport of torch's default process group.

    Everything is made of sends and receives, because gloo's own `all_gather` takes about twice the time of
    those it consists of, and because these run in gloo's thread while this one computes.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout_s = timeout_s
        self._through_host = device.type == "cuda" and "nccl" not in dist.get_backend_config()

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send to and to receive from other workers; see `Transport`."""
        posted = _Posted(what, self._timeout_s)
        operations: list[dist.P2POp] = []
        for distance in range(1, self.world_size):
            source = (self.rank - distance) % self.world_size
            target = (self.rank + distance) % self.world_size
            for tensors in _messages(incoming.get(source, ())):
                message = tensors[0]
                if self._is_packed(tensors):
                    size = sum(tensor.nbytes for tensor in tensors)
                    message = torch.empty(size, dtype=torch.uint8, device=self._device(tensors))
                    posted.packed.append((message, tensors))
                operations.append(dist.P2POp(dist.irecv, message, source))
            for tensors in _messages(outgoing.get(target, ())):
                message = tensors[0]
                if self._is_packed(tensors):
                    message = torch.cat([_bytes(tensor) for tensor in tensors]).to(self._device(tensors))
                operations.append(dist.P2POp(dist.isend, message, target))
        posted.start([operation for operation in operations if operation.tensor.device.type == "cpu"])
        posted.start_batch([operation for operation in operations if operation.tensor.device.type == "cuda"])
        return posted

    def close(self) -> None:
        """Leave the process group."""
        gc.collect()  # a group that outlives the interpreter aborts the process; see pytorch#190489
        dist.destroy_process_group()

    def _is_packed(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) > 1 or (self._through_host and tensors[0].device.type != "cpu")

    def _device(self, tensors: Sequence[Tensor]) -> torch.device:
        """Return where a message lies: in host memory where the backend cannot send from the GPU."""
        return torch.device("cpu") if self._through_host else tensors[0].device


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sort tensors into messages, alike on both ends: small ones of a device share one."""
    small: dict[str, list[Tensor]] = {}
    large = []
    for tensor in tensors:
        if tensor.nbytes > _SMALL_BYTES:
            large.append([tensor])
        elif tensor.numel():
            small.setdefault(tensor.device.type, []).append(tensor)
    return [*small.values(), *large]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass
class _Posted:
    what: str
    timeout_s: float
    works: list[tuple[dist.Work, int | None]] = field(default_factory=list)
    packed: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Start operations on gloo, which takes them one by one, so that an error names the worker."""
        for operation in operations:
            try:
                self.works.append((operation.op(operation.tensor, operation.peer), operation.peer))
            except RuntimeError as error:
                raise self._lost(error, operation.peer) from error

    def start_batch(self, operations: list[dist.P2POp]) -> None:
        """Start operations on NCCL, which would wait for each other if they came one by one."""
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(error) from error
        self.works += [(work, None) for work in works]  # one for the whole batch: it names no worker

    def wait(self) -> None:
        for work, peer in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(error, peer) from error
        for message, tensors in self.packed:
            parts = message.split([tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _bytes(tensor).copy_(part)
        self.works.clear()
        self.packed.clear()

    def _lost(self, error: RuntimeError, peer: int | None = None) -> LostWorkerError:
        who = "another worker" if peer is None else f"worker {peer}"
        return lost_worker(self.what, who, self.timeout_s, error)


def lost_worker(what: str, who: str, timeout_s: float, error: BaseException) -> LostWorkerError:
    """Return the error that names the lost worker and the exchange, and says whether it is gone or silent."""
    # without gloo's source line
    why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    is_silent = ("timed out" in why.lower() or "timeout" in why.lower()) and "refused" not in why
    how = f"did not answer for {timeout_s:g} s" if is_silent else "is gone"
    return LostWorkerError(f"{what}: {who} {how} ({why})")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception of torch's is about another process that is gone or silent."""
    # gloo has no exception type of its own: a RuntimeError that begins with its source file.
    return not isinstance(error, Error) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))
