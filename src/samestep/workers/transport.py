"""Moving tensors between workers: point to point, so that nothing is added on the way."""

from __future__ import annotations

import atexit
import gc
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import DisagreementError, Error, LostWorkerError, UsageError, calls_differ
from samestep.memory.shared_memory import Delivery, SharedMemory
from samestep.workers.ledger import Ledger, Message
from samestep.workers.waiter import Call, Wait, Waiter, Waiting

__all__ = [
    "Alone",
    "Pending",
    "ProcessGroup",
    "Renewable",
    "Tensors",
    "Transport",
    "how_lost",
    "is_lost_connection",
]

Tensors = Mapping[int, Sequence[Tensor]]
"""By rank of the other worker: contiguous tensors, in the order in which they are sent."""

_SMALL_BYTES = 2**18
"""Tensors of up to this many bytes are packed: a copy costs less than another message."""

_ASK_AFTER = 10
"""How many waits of 0.1 s for a message fail before the worker first asks its sender."""

_FOREVER = timedelta(days=10_000)
"""Disables gloo's timeout, which also counts time while all workers are stopped, and cuts all connections."""


class Pending(Protocol):
    """Messages on their way; nothing may touch their tensors before `wait` returns."""

    def wait(self) -> None:
        """Wait until everything has been sent and has arrived; on NCCL, until the GPU's stream has."""


class Transport(Protocol):
    """Sends tensors to the other workers and receives theirs.

    Between two workers, messages arrive in the order in which they were posted; each must be received with
    the sizes, and under the name but for its numbers, with which it was sent. All messages between workers go
    through `post`.
    """

    @property
    def rank(self) -> int:
        """This worker's number, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Workers in the job, W."""

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job."""

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory from which sending costs least, for `size` elements of the kind of `like`.

        It is written to before it is posted, and not any more afterwards.
        """

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send `outgoing` and to fill `incoming`; `what` names it if a worker is lost."""

    def give_up(self, what: str) -> None:
        """Post nothing any more: an interrupt has broken off `what`, for which others may wait."""

    def close(self) -> None:
        """Leave the job; nothing may be posted afterwards."""


@runtime_checkable
class Renewable(Transport, Protocol):
    """A transport whose workers may be others from one time to the next: those left, and newcomers."""

    def is_outside(self) -> bool:
        """Whether this worker, a newcomer, does not belong to the others yet; until then it is alone."""

    def is_due(self) -> bool:
        """Whether all should meet again, because there are newcomers."""

    def term(self) -> tuple[str, int]:
        """Return the job's name, which no other one has, and how often its workers have met."""

    def can_go_on(self) -> None:
        """Let others be lost from now on: this worker will call `regroup` then."""

    def finish(self) -> None:
        """Say that this worker has done its part: it calls `regroup` no more."""

    def has_finished(self) -> bool:
        """Whether it has said so."""

    def send_away(self, ranks: Sequence[int]) -> None:
        """Let newcomers end that cannot begin where the others are: one of them itself, or another worker."""

    def regroup(self) -> None:
        """Meet again, with those that are there now; `rank` and `world_size` may change.

        All workers must call this, where they meet a loss, or because it is due. What was posted before is
        lost.

        Raises:
            LostWorkerError: the others do not come.
        """


class Alone:
    """The transport of a job of one worker: nothing is sent."""

    rank = 0
    world_size = 1
    is_closed = False

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return new memory."""
        return like.new_empty(size)

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Do nothing."""
        return _Nothing()

    def give_up(self, what: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Leave the job."""
        self.is_closed = True


class _Nothing:
    def wait(self) -> None:
        pass


# A forked process must not free a process group that it inherits: gloo would wait for threads that it lacks.
os.register_at_fork(after_in_child=gc.freeze)


class ProcessGroup:
    """The transport of torch's default process group, and of the memory that workers of a host share.

    Everything is made of sends and receives, because gloo's own `all_gather` takes about twice the time of
    those it consists of, and because these run in gloo's thread while this one computes.

    Args:
        device: of this worker.
        timeout_s: how long to wait for another worker.
        is_own: whether samestep has made the group, and ends it. One that the program has made is left to it.

    Attributes:
        shared: what goes to workers of this host goes through it, if there are any in it.
    """

    def __init__(self, device: torch.device, timeout_s: float, *, is_own: bool = True) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.waiter = Waiter(timeout_s, self.rank)
        self.shared = SharedMemory(self.rank, {})
        self.is_on_cpu = device.type == "cpu"
        self._ledger = Ledger()
        self._through_host = device.type == "cuda" and "nccl" not in dist.get_backend_config()
        self._is_own = is_own
        self.is_closed = False

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory to send from; see `Transport`."""
        return self.shared.empty(size, like)

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send to and to receive from other workers; see `Transport`."""
        if self.is_closed:
            raise UsageError(f"{what}: this worker has left the job: expected job.close() as the last call")
        error = self.waiter.peers.error()
        if error is not None:  # otherwise this post could receive messages meant for an earlier one
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
        """Yield the messages that bring these tensors; those with several are unpacked later."""
        for together in _messages(tensors):
            if not self._is_packed(together):
                yield together[0]
                continue
            size = sum(tensor.nbytes for tensor in together)
            message = torch.empty(size, dtype=torch.uint8, device=self._device(together))
            posted.packed.append((message, together))
            yield message

    def _to_send(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the messages that bring these tensors to another worker."""
        for together in _messages(tensors):
            if self._is_packed(together):
                yield torch.cat([_bytes(tensor) for tensor in together]).to(self._device(together))
            else:
                yield together[0]

    def give_up(self, what: str) -> None:
        """Let all others know that this worker was interrupted, and refuse to post."""
        sentence = f"worker {self.rank} was interrupted in the middle of {what}"
        self.waiter.peers.announce(LostWorkerError(sentence))

    def close(self) -> None:
        """Leave the job for good."""
        # A group that outlives the interpreter aborts it: https://github.com/pytorch/pytorch/issues/190489
        gc.collect()
        self.leave()

    def leave(self) -> None:
        """Leave the job; others may follow."""
        self.is_closed = True
        self.waiter.close()
        self.waiter.peers.close()
        self.shared.close()
        if self._is_own:
            _end_group(os.getpid())
        else:  # at exit, if the program does not end its group itself
            atexit.register(_end_group, os.getpid())

    def _is_packed(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) > 1 or (self._through_host and tensors[0].device.type != "cpu")

    def _device(self, tensors: Sequence[Tensor]) -> torch.device:
        """Return where a message lies: in host memory where the backend cannot send from the GPU."""
        return torch.device("cpu") if self._through_host else tensors[0].device


def _end_group(process: int) -> None:
    """End torch's process group, and not in what that process has forked."""
    # A script written for torchrun may have made this call already.
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


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


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class _Posted:
    what: str
    rank: int
    waiter: Waiter
    ledger: Ledger
    expected: dict[int, Message] = field(default_factory=dict)  # by worker, through gloo or NCCL
    calls: list[Call] = field(default_factory=list)  # waits for gloo's works
    batch: list[dist.Work] = field(default_factory=list)  # NCCL's works
    packed: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    waiting: _Watched | None = None
    delivery: Delivery | None = None  # to and from workers of this host

    def start(self, operations: Sequence[dist.P2POp]) -> None:
        """Start operations on gloo, which takes them one by one, so that an error names the worker."""
        for operation in operations:
            with self._naming(operation.peer):
                work = operation.op(operation.tensor, operation.peer, tag=operation.tag)
            self.calls.append((operation.peer, partial(work.wait, _FOREVER)))

    def start_batch(self, operations: list[dist.P2POp]) -> None:
        """Start operations on NCCL, which would wait for each other if they came one by one."""
        with self._naming():
            self.batch = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait for everything; called again, after an interrupt, it goes on."""
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
    """gloo's calls; after a while in vain, this worker says what it waits for, and hears what others do."""

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
            # Ask less and less often: a worker that never waits does not read what it is asked.
            if self._num_looks[self.worker] == _ASK_AFTER << peers.num_asked[self.worker]:
                peers.ask_for(self.worker, posted.expected[self.worker])
        for other, (asked, sent) in posted.ledger.unmet(peers.asked).items():
            self._other_call = calls_differ((posted.rank, sent.what), (other, asked.what))
        return self._other_call is not None


def how_lost(error: BaseException, worker: int | None = None) -> LostWorkerError:
    """Return the error that says which worker is gone, or silent, as an exception of torch's shows it."""
    who = "another worker" if worker is None else f"worker {worker}"
    # Strip the line of gloo's source code.
    why = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    is_silent = ("timed out" in why.lower() or "timeout" in why.lower()) and "refused" not in why
    return LostWorkerError(f"{who} {'did not answer' if is_silent else 'is gone'} ({why})")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception of torch's is about another process that is gone or silent."""
    # gloo raises a plain RuntimeError, with the path of its source file in the message.
    return not isinstance(error, Error) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))
