"""Several workers in one process, on a transport whose every delay follows from one seed.

Each worker runs in a thread of its own, but only one at a time: it passes the turn on where it waits for a
message. Which worker goes on, when a message arrives, whether a sender has to wait for it, and which worker
is killed or stops, and when, all come from the seed, so a seed that fails is a test case.

Messages between two workers arrive in order, as over gloo. What would abort a process there (a message of
another size than its receiver expects) is an `AssertionError` here. Memory that a message should fill holds
garbage until then, and one that a sender still owns is read as late as possible.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep import Job
from samestep.errors import LostWorkerError
from samestep.streams import GlobalStreams

CPU = torch.device("cpu")
GARBAGE = 0xFF  # NaN in floating-point numbers, −1 in integers
_LONGEST_S = 60


class Killed(BaseException):
    """Ends a simulated worker as SIGKILL would: what it has not sent is never sent."""


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
    """By rank: at which of its events (a post or a wait, counted from 1) a worker is killed, or stops."""

    killed: Mapping[int, int] = field(default_factory=dict)
    stopped: Mapping[int, int] = field(default_factory=dict)


def simulate(
    work: Callable[[Job], Any], world_size: int, seed: int = 0, faults: Faults | None = None
) -> list[Outcome]:
    """Run `work` on each worker of a job, and return how each ended."""
    return World(world_size, seed, faults or Faults()).run(work)


def values(work: Callable[[Job], Any], world_size: int, seed: int = 0) -> list[Any]:
    """Return what each worker of a job returned; none may have failed."""
    outcomes = simulate(work, world_size, seed)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


# ---- messages ----------------------------------------------------------------------------------------


@dataclass
class Message:
    """What one post sends to one worker."""

    tensors: list[Tensor]
    arrives: int
    has_arrived: bool = False
    is_dropped: bool = False


@dataclass
class Receive:
    """What one post expects from one worker."""

    tensors: list[Tensor]
    what: str
    has_arrived: bool = False


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class World:
    """All workers, the messages between them, and the clock."""

    def __init__(self, world_size: int, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.time = 0
        self.workers = [Worker(rank, self) for rank in range(world_size)]
        self.sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.expected: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
        self.newest: dict[tuple[int, int], int] = defaultdict(int)
        self.is_over = False
        self.turn_is_back = threading.Semaphore(0)

    def run(self, work: Callable[[Job], Any]) -> list[Outcome]:
        outside = GlobalStreams.capture(CPU)
        for worker in self.workers:
            worker.streams = outside
            worker.start(work)
        while any(worker.is_running and not worker.has_stopped for worker in self.workers):
            ready = [worker for worker in self.workers if worker.is_ready]
            if ready:
                self.random.choice(ready).take_turn()
            elif not self.let_time_pass():
                self.give_up()
        self.is_over = True
        for worker in self.workers:
            worker.release()
        outside.restore()
        return [worker.outcome for worker in self.workers]

    def send(self, source: int, target: int, tensors: Sequence[Tensor]) -> Message:
        # In order between two workers, as late as chance has it; sometimes the sender may go on at once.
        pair = (source, target)
        self.newest[pair] = max(self.newest[pair], self.time) + self.random.choice((0, 1, 5, 50))
        is_buffered = self.random.random() < 0.5
        message = Message([t.clone() if is_buffered else t for t in tensors], self.newest[pair])
        self.sent[pair].append(message)
        if is_buffered:
            return Message([], 0, has_arrived=True)
        return message

    def deliver(self) -> None:
        """Let arrive what is due and expected."""
        for pair, messages in self.sent.items():
            expected = self.expected[pair]
            while messages and expected and messages[0].arrives <= self.time:
                message, receive = messages.popleft(), expected.popleft()
                sizes = [[tensor.nbytes for tensor in each.tensors] for each in (message, receive)]
                assert sizes[0] == sizes[1], f"{pair[0]} sends {sizes[0]}, {pair[1]} expects {sizes[1]}"
                for tensor, content in zip(receive.tensors, message.tensors, strict=True):
                    as_bytes(tensor).copy_(as_bytes(content))
                message.has_arrived = receive.has_arrived = True

    def let_time_pass(self) -> bool:
        """Move the clock to the next message that somebody expects; say whether there is one."""
        times = [m[0].arrives for pair, m in self.sent.items() if m and self.expected[pair]]
        if not times:
            return False
        self.time = max(self.time, min(times))
        self.deliver()
        return True

    def give_up(self) -> None:
        """Nothing can arrive any more: all that wait have waited for the timeout."""
        for worker in self.workers:
            worker.has_timed_out = not worker.has_stopped

    def end(self, rank: int) -> None:
        """Drop what a worker that is gone has not delivered, and what it will never take."""
        for (source, target), messages in self.sent.items():
            if rank in (source, target):
                for message in messages:
                    message.is_dropped = True
                messages.clear()


# ---- workers -----------------------------------------------------------------------------------------


class Worker:
    """A thread that runs in turns, and its transport."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank = rank
        self.world = world
        self.outcome = Outcome()
        self.streams: GlobalStreams | None = None
        self.is_running = True
        self.has_stopped = False
        self.has_timed_out = False
        self.num_events = 0
        self.condition: Callable[[], bool] = lambda: True
        self.turn = threading.Semaphore(0)

    @property
    def world_size(self) -> int:
        return len(self.world.workers)

    def start(self, work: Callable[[Job], Any]) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[Job], Any]) -> None:
        self.turn.acquire()
        try:
            self.streams.restore()
            self.outcome.value = work(Job(CPU, transport=self))
        except BaseException as error:
            self.outcome.error = error
        self.is_running = False
        if isinstance(self.outcome.error, Killed):
            self.world.end(self.rank)
        self.world.turn_is_back.release()

    @property
    def is_ready(self) -> bool:
        return self.is_running and not self.has_stopped and (self.has_timed_out or self.condition())

    def take_turn(self) -> None:
        """Run until the worker waits for something, or ends."""
        self.turn.release()
        assert self.world.turn_is_back.acquire(timeout=_LONGEST_S), f"worker {self.rank} hangs outside waits"

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Pass the turn on until the condition holds; say whether it does, and not the timeout came first."""
        self.streams = GlobalStreams.capture(CPU)
        self.condition = condition
        self.world.turn_is_back.release()
        self.turn.acquire()
        if self.world.is_over:
            raise Killed
        self.streams.restore()
        self.condition = lambda: True
        timed_out, self.has_timed_out = self.has_timed_out, False
        return condition() or not timed_out

    def release(self) -> None:
        """End a thread that has stopped for good."""
        if self.thread.is_alive():
            self.turn.release()
            self.thread.join(_LONGEST_S)

    def note_event(self) -> None:
        self.num_events += 1
        if self.world.faults.killed.get(self.rank) == self.num_events:
            raise Killed
        if self.world.faults.stopped.get(self.rank) == self.num_events:
            self.has_stopped = True
            self.wait_until(lambda: False)

    # ---- what `Transport` asks for ---------------------------------------------------------------------

    def post(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> Posted:
        self.note_event()
        received, sent = {}, {}
        for source, tensors in incoming.items():
            filled = [tensor for tensor in tensors if tensor.numel()]
            if filled:
                for tensor in filled:
                    assert tensor.is_contiguous()
                    as_bytes(tensor).fill_(GARBAGE)
                received[source] = Receive(filled, what)
                self.world.expected[source, self.rank].append(received[source])
        for target, tensors in outgoing.items():
            content = [tensor for tensor in tensors if tensor.numel()]
            if content:
                sent[target] = self.world.send(self.rank, target, content)
        return Posted(self, what, received, sent)

    def close(self) -> None:
        pass


@dataclass
class Posted:
    """Messages on their way."""

    worker: Worker
    what: str
    received: dict[int, Receive]
    sent: dict[int, Message]

    def wait(self) -> None:
        self.worker.note_event()
        world = self.worker.world
        has_all = self.worker.wait_until(lambda: self._is_done or self._lost() is not None)
        if not self._is_done:
            lost = self._lost()
            who, how = ("another worker", "did not answer") if lost is None else (f"worker {lost}", "is gone")
            assert lost is not None or not has_all
            raise LostWorkerError(f"{self.what}: {who} {how} at {world.time}")
        self.received.clear()
        self.sent.clear()

    @property
    def _is_done(self) -> bool:
        self.worker.world.deliver()
        return all(each.has_arrived for each in (*self.received.values(), *self.sent.values()))

    def _lost(self) -> int | None:
        """Return a worker that has gone and is still needed."""
        for rank, each in (*self.received.items(), *self.sent.items()):
            peer = self.worker.world.workers[rank]
            if not each.has_arrived and not peer.is_running and not self._may_still_arrive(rank):
                return rank
        return None

    def _may_still_arrive(self, rank: int) -> bool:
        return bool(self.worker.world.sent[rank, self.worker.rank])
