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
        """Wait until everything has been sent and has arrived; on NCCL, until the GPU's stream has.

        Raises:
            LostWorkerError: a worker is gone, or did not answer within the timeout.
        """


class Transport(Protocol):
    """Sends tensors to the other workers and receives theirs.

    Between two workers, messages arrive in the order in which they were posted; each must be received with
    the sizes with which it was sent. All messages between workers go through `post`.

    Attributes:
        rank: this worker's number, 0 <= rank < world_size.
        world_size: workers in the job, W.
    """

    @property
    def rank(self) -> int:
        """This worker's number."""

    @property
    def world_size(self) -> int:
        """Workers in the job, W."""

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send to and to receive from other workers.

        Args:
            outgoing: what to send.
            incoming: what to fill.
            what: names the exchange in the message if a worker is lost.

        Raises:
            LostWorkerError: a worker is gone.
        """

    def close(self) -> None:
        """Leave the job; nothing may be posted afterwards."""


@dataclass(frozen=True)
class Alone:
    """The transport of a job of one worker: nothing is sent."""

    rank: int = 0
    world_size: int = 1

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Do nothing."""
        return _Arrived()

    def close(self) -> None:
        """Do nothing."""


class _Arrived:
    def wait(self) -> None:
        pass


class ProcessGroup:
    """The transport of torch's default process group.

    Everything is made of sends and receives, because gloo's own `all_gather` takes about twice the time of
    those it consists of, and because these run in gloo's thread while this one computes.

    Args:
        device: what this worker computes on.
        timeout_s: seconds after which a worker that does not answer counts as lost.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout_s = timeout_s
        self._through_host = device.type == "cuda" and "nccl" not in dist.get_backend_config()

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send to and to receive from other workers; see `Transport`."""
        pending = _Posted(what, self._timeout_s)
        operations: list[dist.P2POp] = []
        for distance in range(1, self.world_size):
            source = (self.rank - distance) % self.world_size
            target = (self.rank + distance) % self.world_size
            for message in self._messages(incoming.get(source, ())):
                operations.append(dist.P2POp(dist.irecv, message.to_fill(), source))
                pending.incoming.append(message)
            for message in self._messages(outgoing.get(target, ())):
                operations.append(dist.P2POp(dist.isend, message.packed(), target))
        pending.start([operation for operation in operations if operation.tensor.device.type == "cpu"])
        pending.start_batch([operation for operation in operations if operation.tensor.device.type == "cuda"])
        return pending

    def close(self) -> None:
        """Leave the process group."""
        gc.collect()  # a group that outlives the interpreter aborts the process; see pytorch#190489
        dist.destroy_process_group()

    def _messages(self, tensors: Sequence[Tensor]) -> list[_Message]:
        """Sort tensors into messages, alike on both ends: small ones of a device share one."""
        small: dict[str, list[Tensor]] = {}
        messages = []
        for tensor in tensors:
            if tensor.nbytes > _SMALL_BYTES:
                messages.append(_Message([tensor], self._through_host))
            elif tensor.numel():
                small.setdefault(tensor.device.type, []).append(tensor)
        return [*(_Message(group, self._through_host) for group in small.values()), *messages]


@dataclass
class _Posted:
    what: str
    timeout_s: float
    works: list[dist.Work] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    incoming: list[_Message] = field(default_factory=list)

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Start operations on gloo, which takes them one by one, so that an error names the worker."""
        for operation in operations:
            try:
                self.works.append(operation.op(operation.tensor, operation.peer))
            except RuntimeError as error:
                raise self._lost(error, operation.peer) from error
            self.peers.append(operation.peer)

    def start_batch(self, operations: list[dist.P2POp]) -> None:
        """Start operations on NCCL, which would wait for each other if they came one by one."""
        try:
            self.works += dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self) -> None:
        for position, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                # NCCL returns one work for a whole batch, which does not say which worker is lost.
                peer = self.peers[position] if len(self.works) == len(self.peers) else None
                raise self._lost(error, peer) from error
        for message in self.incoming:
            message.unpack()
        self.works.clear()
        self.incoming.clear()

    def _lost(self, error: RuntimeError, peer: int | None = None) -> LostWorkerError:
        who = "another worker" if peer is None else f"worker {peer}"
        return lost_worker(self.what, who, self.timeout_s, error)


class _Message:
    """Tensors that travel together, through host memory where the backend cannot send from the GPU."""

    def __init__(self, tensors: list[Tensor], through_host: bool) -> None:
        self._tensors = tensors
        self._device = torch.device("cpu") if through_host else tensors[0].device
        self._is_plain = len(tensors) == 1 and tensors[0].device.type == self._device.type
        self._buffer = tensors[0]

    def packed(self) -> Tensor:
        """Return what to send."""
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
