"""Simulates several workers in one process, with a transport that takes every delay from one seed.

Each worker is a thread, but only one runs at a time: it passes the turn on when it waits for a message. The
seed decides which worker runs next, when a message arrives and whether its sender has to wait for that, so a
seed that fails is a test case. Faults (see `Faults`) are given for events of a worker.

Messages between two workers arrive in order, as over gloo. A message that differs in size or name from what
its receiver expects is an `AssertionError`, which no worker can catch. A tensor to be filled holds garbage
until its message arrives. A sender's tensor is read as late as possible; memory from `empty`, even after its
sender's wait has returned. Posting to a worker that is gone fails at once, or at the wait. After a loss, a
worker can post nothing more, and a wait of `TIMEOUT` without an answer closes all its connections.

The random generators of the process are saved and restored whenever the turn goes to another worker.
"""

from __future__ import annotations

import math
import random
import threading
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import Job
from samestep.errors import LostWorkerError, kind_of_call
from samestep.streams import GlobalStreams

CPU = torch.device("cpu")
GARBAGE = 0xFF  # NaN in floating-point numbers, −1 in integers
TIMEOUT = 10_000  # of a wait, by the simulated clock; a message takes up to 50
_LONGEST_S = 60  # real time for which a worker may run until it waits


class Killed(BaseException):
    """Ends a simulated worker as SIGKILL would: it sends nothing more."""


@dataclass
class Outcome:
    """How a worker ended: with a value, with an exception, or killed."""

    value: Any = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


@dataclass
class Faults:
    """By rank, the event (a post or a wait, counted from 1) at which a worker is killed, stopped or stalled.

    A stalled worker continues after some time: (event, time).
    """

    killed: Mapping[int, int] = field(default_factory=dict)
    stopped: Mapping[int, int] = field(default_factory=dict)
    stalled: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def simulate(
    work: Callable[[Job], Any], world_size: int, seed: int = 0, faults: Faults | None = None
) -> list[Outcome]:
    """Run `work` on each worker of a job, and return how each ended."""
    return World(world_size, seed, faults).run(work)


def values(work: Callable[[Job], Any], world_size: int, seed: int = 0) -> list[Any]:
    """Return each worker's result, or raise the first error."""
    outcomes = simulate(work, world_size, seed)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def let_go(error: BaseException | None) -> None:
    """End the generators in an exception's frames now: they restore global state of the process."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def locked() -> threading.Lock:
    """Return an acquired lock, for another thread to release: cheaper than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


# ---- messages ----------------------------------------------------------------------------------------


@dataclass
class Message:
    """A post's message to one worker."""

    tensors: list[Tensor]  # as bytes
    kind: str
    arrives: int
    has_arrived: bool = False


@dataclass
class Receive:
    """A post's expected message from one worker."""

    tensors: list[Tensor]  # as bytes
    kind: str
    has_arrived: bool = False


def as_bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views, as bytes, of the tensors that are not empty."""
    return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class World:
    """All workers, the messages between them, and the clock.

    Args:
        draws: whether workers draw from the global generators, which then are saved and restored.

    Attributes:
        events: what happened, in order: (worker, "post", "wait" or a fault, name of the message, time).
    """

    def __init__(
        self, world_size: int, seed: int, faults: Faults | None = None, *, draws: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.time = 0
        self.events: list[tuple[int, str, str, int]] = []
        self.workers = [Worker(rank, self) for rank in range(world_size)]
        self.sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.expected: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self.newest: dict[tuple[int, int], int] = defaultdict(int)
        self.defect: AssertionError | None = None
        self.is_over = False
        self.gone: set[int] = set()  # workers that have ended or timed out
        self.draws = draws
        self.chosen: Worker | None = None
        self.nobody_is_left = locked()

    def run(self, work: Callable[[Job], Any]) -> list[Outcome]:
        outside = self.streams()
        for worker in self.workers:
            worker.streams = outside
            worker.start(work)
        with TorchDispatchMode():  # restores torch's flags, which modes in several threads mix up
            self.choose()
            self.pass_on()
            self.watch()
            self.is_over = True
            for worker in self.workers:
                worker.release()
        if outside is not None:
            outside.restore()
        if self.defect is not None:
            raise self.defect
        return [worker.outcome for worker in self.workers]

    def streams(self) -> GlobalStreams | None:
        return GlobalStreams.capture(CPU) if self.draws else None

    def choose(self) -> None:
        """Set `chosen` to the worker that runs next, or to None if none can."""
        self.chosen = None
        try:
            while self.chosen is None:
                self.deliver()
                ready = [worker for worker in self.workers if worker.is_ready]
                if ready:
                    self.chosen = self.random.choice(ready)
                elif not self.let_time_pass():
                    return
        except AssertionError as defect:  # no worker may catch it
            self.defect = defect

    def pass_on(self) -> None:
        """Let the chosen worker run."""
        (self.nobody_is_left if self.chosen is None else self.chosen.turn).release()

    def watch(self) -> None:
        """Wait until no worker can run."""
        num_events = -1
        while not self.nobody_is_left.acquire(timeout=_LONGEST_S):
            assert len(self.events) > num_events, f"worker {self.chosen.number} hangs outside waits"
            num_events = len(self.events)

    def send(self, source: int, target: int, tensors: Sequence[Tensor], kind: str) -> Message:
        # Messages between two workers keep their order. The delay is random; so is whether the sender waits.
        pair = (source, target)
        self.newest[pair] = max(self.newest[pair], self.time) + self.random.choice((0, 1, 5, 50))
        is_buffered = self.random.random() < 0.5
        lent = self.workers[source].lent if is_buffered else {}
        held = [t if not is_buffered or address(t) in lent else t.clone() for t in tensors]
        message = Message(held, kind, self.newest[pair])
        self.sent[pair].append(message)
        if is_buffered:
            return Message([], kind, 0, has_arrived=True)
        return message

    def deliver(self) -> None:
        """Deliver the messages that are due and expected."""
        for pair, messages in self.sent.items():
            expected = self.expected[pair]
            while messages and expected and messages[0].arrives <= self.time:
                message, receive = messages.popleft(), expected.popleft()
                both = [
                    (each.kind, [tensor.nbytes for tensor in each.tensors]) for each in (message, receive)
                ]
                assert both[0] == both[1], f"{pair[0]} sends {both[0]}, {pair[1]} expects {both[1]}"
                for tensor, content in zip(receive.tensors, message.tensors, strict=True):
                    tensor.copy_(content)
                message.has_arrived = receive.has_arrived = True

    def let_time_pass(self) -> bool:
        """Move the clock to the next expected message or timeout; return False if there is none."""
        times: list[float] = [m[0].arrives for pair, m in self.sent.items() if m and self.expected[pair]]
        times += [worker.deadline for worker in self.workers if worker.is_running]
        times += self.more_times()
        next_time = min(times, default=math.inf)
        if next_time == math.inf:
            return False
        self.time = max(self.time, int(next_time))
        return True

    def more_times(self) -> list[int]:
        """Return the times of other events, in subclasses."""
        return []

    def note_fault(self, rank: int, kind: str) -> None:
        self.events.append((rank, kind, "", self.time))

    def end(self, rank: int, *, is_killed: bool) -> None:
        """Drop all messages to a worker that is gone and, if it was killed, those from it."""
        self.gone.add(rank)
        for pair, receives in self.expected.items():
            if pair[1] == rank:
                receives.clear()
        for pair, messages in self.sent.items():
            if pair[1] == rank or (is_killed and pair[0] == rank):
                messages.clear()


# ---- workers -----------------------------------------------------------------------------------------


@dataclass
class _Ending:
    """The end of a worker's thread; an object of its own, so that the first step's checks do not read it."""

    worker: Worker

    def close(self) -> None:
        worker, world = self.worker, self.worker.world
        worker.is_running = False
        world.end(worker.number, is_killed=isinstance(worker.outcome.error, Killed))
        if not world.is_over:
            world.choose()
            world.pass_on()


class Worker:
    """A thread that runs in turns, and its transport."""

    def __init__(self, rank: int, world: World) -> None:
        self.number = self.rank = rank
        self.world = world
        self.outcome = Outcome()
        self.streams: GlobalStreams | None = None
        self.is_running = True
        self.is_closed = False
        self.loss: str | None = None  # the first loss that this worker noticed: it can then post no more
        self.num_events = 0
        self.calls: dict[tuple[int, bool], Callable[[], None]] = {}  # by event, and whether to call after it
        self.condition: Callable[[], bool] = lambda: True
        self.deadline = math.inf
        self.turn = locked()
        self.lent: dict[int, None] = {}  # addresses of memory from `empty`

    @property
    def world_size(self) -> int:
        return len(self.world.workers)

    def start(self, work: Callable[[Job], Any]) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[Job], Any]) -> None:
        with closing(_Ending(self)):
            try:
                self._take_over()
                self.outcome.value = work(Job(CPU, transport=self))
            except BaseException as error:
                self.outcome.error = error
                let_go(error)

    # Without source, because the first step's checks would follow each program here, and again where it runs.
    _run.__code__ = _run.__code__.replace(co_filename="<the thread of a simulated worker>")

    @property
    def is_ready(self) -> bool:
        return self.is_running and (self.world.time >= self.deadline or self.condition())

    def _take_over(self) -> None:
        """Wait for the turn, and restore the generators as this worker left them."""
        self.turn.acquire()
        if self.world.is_over:
            raise Killed
        if self.streams is not None:
            self.streams.restore()

    def wait_until(self, condition: Callable[[], bool], longest: float) -> None:
        """Pass the turn on until the condition holds or `longest` has passed."""
        self.condition, self.deadline = condition, self.world.time + longest
        self.world.choose()
        if self.world.chosen is not self:
            self.streams = self.world.streams()
            self.world.pass_on()
            self._take_over()
        self.condition, self.deadline = lambda: True, math.inf

    def release(self) -> None:
        """End a thread that still waits for its turn."""
        if self.thread.is_alive():
            self.turn.release()
            self.thread.join(_LONGEST_S)

    def note_event(self, kind: str, what: str) -> None:
        self.num_events += 1
        self.world.events.append((self.number, kind, what, self.world.time))
        # Also at later events, so that exception handlers send nothing.
        faults = self.world.faults
        if self.world.is_over:
            raise Killed
        if self.num_events >= faults.killed.get(self.number, math.inf):
            self.world.note_fault(self.number, "killed")
            raise Killed
        if faults.stopped.get(self.number) == self.num_events:
            self.world.note_fault(self.number, "stopped")
            self.wait_until(lambda: False, math.inf)
        event, time = faults.stalled.get(self.number, (0, 0))
        if event == self.num_events:
            self.world.note_fault(self.number, "stalled")
            self.wait_until(lambda: False, time)
        self.call(is_after=False)

    def call(self, *, is_after: bool) -> None:
        """Call the function, if any, that is planted at this event."""
        self.calls.get((self.num_events, is_after), lambda: None)()

    def lost_sources(self, peers: Iterable[int]) -> list[int]:
        """Return the peers from which nothing more can arrive."""
        return [peer for peer in self.lost_targets(peers) if not self.world.sent[peer, self.number]]

    def lost_targets(self, peers: Iterable[int]) -> list[int]:
        """Return the peers that receive nothing more: all of them, if this worker has timed out."""
        return [peer for peer in peers if self.is_gone(peer)] if self.world.gone else []

    def is_gone(self, peer: int) -> bool:
        """Say whether another worker, or this one, has ended or timed out."""
        return peer in self.world.gone or self.number in self.world.gone

    def rank_of(self, number: int) -> int:
        """Return the rank of a worker."""
        return number

    def number_of(self, rank: int) -> int:
        """Return the number of a worker, which identifies it in the world."""
        return rank

    def lost_worker(self, what: str, lost: Sequence[int]) -> LostWorkerError:
        """Close the connections to lost workers, and return the error.

        Without lost workers this is a timeout, after which gloo closes all connections
        (`UnboundBuffer::waitRecv` signals all pairs).
        """
        for peer in lost:
            self.world.sent[peer, self.number].clear()
        if not lost:
            self.world.end(self.number, is_killed=True)
        who, how = (
            (f"worker {self.rank_of(lost[0])}", "is gone") if lost else ("another worker", "did not answer")
        )
        self.loss = self.loss or f"{who} {how} at {self.world.time}"
        return LostWorkerError(f"{what}: {self.loss}")

    # ---- the methods of `Transport` --------------------------------------------------------------------

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory that is read as late as possible, even after its sender's wait has returned."""
        memory = np.full(size * like.dtype.itemsize, GARBAGE, dtype=np.uint8)
        found = torch.from_numpy(memory)
        self.lent[address(found)] = None
        weakref.finalize(memory, self.lent.pop, address(found)).atexit = False
        return found.view(like.dtype)

    def post(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> Posted:
        self.note_event("post", what)
        if self.loss is not None:
            raise LostWorkerError(f"{what}: {self.loss}")
        to_fill = {self.number_of(rank): filled for rank, t in incoming.items() if (filled := as_bytes(t))}
        to_send = {self.number_of(rank): content for rank, t in outgoing.items() if (content := as_bytes(t))}
        lost = [*self.lost_sources(to_fill), *self.lost_targets(to_send)]
        if lost and self.world.random.random() < 0.5:
            raise self.lost_worker(what, lost)
        kind = kind_of_call(what)
        received = {source: Receive(tensors, kind) for source, tensors in to_fill.items()}
        for source, receive in received.items():
            for tensor in receive.tensors:
                tensor.fill_(GARBAGE)
            self.world.expected[source, self.number].append(receive)
        sent = {number: self.world.send(self.number, number, t, kind) for number, t in to_send.items()}
        self.call(is_after=True)
        return Posted(self, what, received, sent)

    def accuse(self, peers: Sequence[int]) -> None:
        """Note the workers that sent nothing in time, in subclasses."""

    def give_up(self, what: str) -> None:
        if self.world_size > 1:
            self.loss = self.loss or f"worker {self.rank} was interrupted in the middle of {what}"

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Posted:
    """Messages that were posted, until `wait`."""

    worker: Worker
    what: str
    received: dict[int, Receive]
    sent: dict[int, Message]

    def wait(self) -> None:
        self.worker.note_event("wait", self.what)
        self.worker.wait_until(lambda: self._is_done or bool(self._lost), TIMEOUT)
        if not self._is_done:
            if not self._lost:
                posted = [*self.received.items(), *self.sent.items()]
                self.worker.accuse([number for number, each in posted if not each.has_arrived])
            raise self.worker.lost_worker(self.what, self._lost)
        self.received.clear()
        self.sent.clear()
        self.worker.call(is_after=True)

    @property
    def _is_done(self) -> bool:
        return all(each.has_arrived for each in (*self.received.values(), *self.sent.values()))

    @property
    def _lost(self) -> list[int]:
        sources = [rank for rank, receive in self.received.items() if not receive.has_arrived]
        targets = [rank for rank, message in self.sent.items() if not message.has_arrived]
        return [*self.worker.lost_sources(sources), *self.worker.lost_targets(targets)]
