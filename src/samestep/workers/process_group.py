"""Sends tensors through torch's process group, and through shared memory between workers of a host."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import DisagreementError, Error, LostWorkerError, UsageError, calls_differ
from samestep.memory.shared_memory import Delivery, SharedMemory
from samestep.workers.ledger import Ledger, Message
from samestep.workers.meeting import meet
from samestep.workers.peers import Peers
from samestep.workers.transport import Pending, Tensors
from samestep.workers.waiter import Call, Wait, Waiter, Waiting

__all__ = ["ProcessGroup", "how_lost", "is_lost_connection"]

_SMALL_BYTES = 2**18
"""Tensors of up to this many bytes are packed: a copy costs less than another message."""

_ASK_AFTER = 10
"""How many waits of 0.1 s for a message fail before the worker first asks its sender."""

_FOREVER = timedelta(days=10_000)
"""Disables gloo's timeout, which counts time while all workers are stopped, and ends all connections."""

# A forked process must not free a process group that it inherits: gloo would wait for missing threads.
os.register_at_fork(after_in_child=gc.freeze)


class ProcessGroup:
    """Sends through torch's default process group, and through shared memory between workers of a host.

    It uses only sends and receives: gloo's `all_gather` takes about twice as long as the same sends and
    receives, and these run in gloo's thread while this one computes.

    Args:
        device: this worker's device.
        timeout_s: how long to wait for another worker.
        is_own: whether samestep has made the group. If so, `leave` destroys it; otherwise that is left to the
            program.

    Attributes:
        shared: the shared memory; all messages to the workers in it use it.
    """

    def __init__(self, device: torch.device, timeout_s: float, *, is_own: bool = True) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.waiter = Waiter(timeout_s, self.rank)
        self.shared = SharedMemory(self.rank, {})
        self._shares_memory = device.type == "cpu"
        self._ledger = Ledger()
        self._through_host = device.type == "cuda" and "nccl" not in dist.get_backend_config()
        self._is_own = is_own
        self.is_closed = False

    def connect(self, ask_launchers: Callable[[], str | None] | None = None) -> None:
        """Connect to the other workers, to notice losses and to share memory; all workers must call this.

        Args:
            ask_launchers: as for `Peers`.
        """
        self.waiter.peers = Peers({}, ask_launchers)  # to notice losses while they connect
        connections, channels = meet(self, shares_memory=self._shares_memory)
        self.waiter.peers = Peers(connections, ask_launchers)
        self.shared = SharedMemory(self.rank, channels)

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory to send from; see `Transport`."""
        return self.shared.empty(size, like)

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send and to receive; see `Transport`."""
        if self.is_closed:
            raise UsageError(f"{what}: this worker has left the job: expected job.close() as the last call")
        error = self.waiter.peers.error()
        if error is not None:  # this post could receive messages that were meant for an earlier one
            raise _at(what, error)
        posted = _Posted(what, self.rank, self.waiter, self._ledger)
        operations: list[dist.P2POp] = []
        for distance in range(1, self.world_size):
            source = (self.rank - distance) % self.world_size
            target = (self.rank + distance) % self.world_size
            if source not in self.shared and (num_bytes := _num_bytes(incoming.get(source, ()))):
                to_fill = self._to_fill(incoming[source], posted)
                message = posted.expected[source] = self._ledger.expect(source, num_bytes, what)
                operations += [dist.P2POp(dist.irecv, part, source, tag=message.tag) for part in to_fill]
            if target not in self.shared and (num_bytes := _num_bytes(outgoing.get(target, ()))):
                to_send = self._to_send(outgoing[target])
                message = self._ledger.send(target, num_bytes, what)
                operations += [dist.P2POp(dist.isend, part, target, tag=message.tag) for part in to_send]
        posted.delivery = self.shared.post(outgoing, incoming, what)
        posted.start([operation for operation in operations if operation.tensor.device.type == "cpu"])
        posted.start_batch([operation for operation in operations if operation.tensor.device.type == "cuda"])
        return posted

    def _to_fill(self, tensors: Sequence[Tensor], posted: _Posted) -> Iterator[Tensor]:
        """Yield the messages to receive for these tensors; packed ones are unpacked in `_Posted.wait`."""
        for together in _messages(tensors):
            if not self._is_packed(together):
                yield together[0]
                continue
            size = sum(tensor.nbytes for tensor in together)
            message = torch.empty(size, dtype=torch.uint8, device=self._device(together))
            posted.packed.append((message, together))
            yield message

    def _to_send(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the messages to send for these tensors; small ones are packed."""
        for together in _messages(tensors):
            if self._is_packed(together):
                yield torch.cat([_bytes(tensor) for tensor in together]).to(self._device(together))
            else:
                yield together[0]

    def give_up(self, what: str) -> None:
        """Report to all others that this worker was interrupted; later posts raise the same error."""
        sentence = f"worker {self.rank} was interrupted in the middle of {what}"
        self.waiter.peers.announce(LostWorkerError(sentence))

    def close(self) -> None:
        """Leave the job for good."""
        # A group that outlives the interpreter aborts it: https://github.com/pytorch/pytorch/issues/190489
        gc.collect()
        self.leave()

    def leave(self) -> None:
        """Leave the group; the process may join another one afterwards."""
        self.is_closed = True
        self.waiter.close()
        self.waiter.peers.close()
        self.shared.close()
        if self._is_own:
            _end_group(os.getpid())
        else:  # at exit, in case the program does not destroy its group itself
            atexit.register(_end_group, os.getpid())

    def _is_packed(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) > 1 or (self._through_host and tensors[0].device.type != "cpu")

    def _device(self, tensors: Sequence[Tensor]) -> torch.device:
        """Return the device of a message: the CPU if the backend cannot send from the GPU."""
        return torch.device("cpu") if self._through_host else tensors[0].device


def _end_group(process: int) -> None:
    """Destroy torch's process group, unless this is a forked child of that process."""
    # A script written for torchrun may have destroyed it already.
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors into messages, in the same way on both ends: small ones of a device share one."""
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


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class _Posted:
    what: str
    rank: int
    waiter: Waiter
    ledger: Ledger
    expected: dict[int, Message] = field(default_factory=dict)  # by worker, through gloo or NCCL
    calls: list[Call] = field(default_factory=list)  # for gloo: `wait` of each `dist.Work`
    batch: list[dist.Work] = field(default_factory=list)  # for NCCL
    packed: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    waiting: _Watched | None = None
    delivery: Delivery | None = None  # to and from workers of this host

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Start operations on gloo, one by one, so that an error can name the worker."""
        for operation in operations:
            with self._naming(operation.peer):
                work = operation.op(operation.tensor, operation.peer, tag=operation.tag)
            self.calls.append((operation.peer, partial(work.wait, _FOREVER)))

    def start_batch(self, operations: list[dist.P2POp]) -> None:
        """Start operations on NCCL together, because one by one they would wait for each other."""
        with self._naming():
            self.batch = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait for all messages; after an interrupt, it can be called again."""
        if self.delivery is not None:
            self._wait_for(self.delivery)
        if self.calls and self.waiting is None:
            self.waiting = _Watched(self.waiter.start(self.calls), self)
        if self.waiting is not None:
            self._wait_for(self.waiting)
        for work in self.batch:
            with self._naming():
                work.wait()  # in this thread, because NCCL makes this thread's CUDA stream wait
        for message, tensors in self.packed:
            parts = message.split([tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _bytes(tensor).copy_(part)
        self.calls, self.batch, self.packed, self.waiting, self.delivery = [], [], [], None, None

    def _wait_for(self, waiting: Waiting) -> None:
        try:
            self.waiter.finish(waiting)
        except Error as error:
            raise self._first(error) from None
        if isinstance(waiting.error, Error):
            self.waiter.leave_thread()
            raise self._first(waiting.error)
        if waiting.error is not None:
            raise self._first(how_lost(waiting.error, waiting.worker), waiting.worker) from waiting.error

    @contextmanager
    def _naming(self, peer: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self._first(how_lost(error, peer), peer) from error

    def _first(self, error: Error, worker: int | None = None) -> Error:
        return _at(self.what, self.waiter.first_error(error, worker))


def _at(what: str, error: Error) -> Error:
    return type(error)(f"{what}: {error}")


class _Watched:
    """Waits for gloo's calls; after a while, asks the sender, and checks whether others make other calls."""

    def __init__(self, calls: Wait, posted: _Posted) -> None:
        self._calls, self._posted = calls, posted
        self._num_looks = Counter[int]()  # by worker
        self._other_call: DisagreementError | None = None

    @property
    def worker(self) -> int | None:
        return self._calls.worker

    @property
    def error(self) -> BaseException | None:
        return self._other_call or self._calls.error

    def is_done(self, timeout_s: float) -> bool:
        if self._calls.is_done(timeout_s):
            return True
        posted, peers = self._posted, self._posted.waiter.peers
        if self.worker is not None and self.worker in posted.expected:
            self._num_looks[self.worker] += 1
            # Ask less and less often, because a worker reads the questions only while it waits itself.
            if self._num_looks[self.worker] == _ASK_AFTER << peers.num_asked[self.worker]:
                peers.ask_for(self.worker, posted.expected[self.worker])
        for other, (asked, sent) in posted.ledger.unmet(peers.asked).items():
            self._other_call = calls_differ((posted.rank, sent.what), (other, asked.what))
        return self._other_call is not None


def how_lost(error: BaseException, worker: int | None = None) -> LostWorkerError:
    """Return the error for a worker that is gone or silent, from an exception of torch."""
    who = "another worker" if worker is None else f"worker {worker}"
    # Without the location in gloo's source code.
    why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    is_silent = ("timed out" in why.lower() or "timeout" in why.lower()) and "refused" not in why
    return LostWorkerError(f"{who} {'did not answer' if is_silent else 'is gone'} ({why})")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception of torch says that another process is gone or silent."""
    # gloo raises a plain RuntimeError; only the path of its source file in the message identifies it.
    return not isinstance(error, Error) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))
