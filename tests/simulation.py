"""Several workers in one process, on a transport whose every delay follows from one seed.

Each worker runs in a thread of its own, but only one at a time: it passes the turn on where it waits for a
message. Which worker goes on, when a message arrives, whether a sender has to wait for it, and which worker
is killed or stops, and when, all come from the seed, so a seed that fails is a test case.

Messages between two workers arrive in order, as over gloo. What would abort a process there (a message of
another size than its receiver expects) is an `AssertionError` here. Memory that a message should fill holds
garbage until then, and one that a sender still owns is read as late as possible. Posting to a worker that
is gone fails at once, or when the post is waited for. What a process has for itself, its generators, is put
away and back where the turn goes to another worker.
"""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    return World(world_size, seed, faults).run(work)


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


@dataclass
class Receive:
    """What one post expects from one worker."""

    tensors: list[Tensor]
    has_arrived: bool = False


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def not_empty(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]


class World:
    """All workers, the messages between them, and the clock.

    Attributes:
        events: what happened, in order: which worker posted or waited, for what, and when.
    """

    def __init__(self, world_size: int, seed: int, faults: Faults | None = None) -> None:
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
        self.turn_is_back = threading.Semaphore(0)

    def run(self, work: Callable[[Job], Any]) -> list[Outcome]:
        outside = GlobalStreams.capture(CPU)
        for worker in self.workers:
            worker.streams = outside
            worker.start(work)
        self.choose()
        while self.chosen is not None:
            self.chosen.take_turn()
        self.is_over = True
        for worker in self.workers:
            worker.release()
        outside.restore()
        if self.defect is not None:
            raise self.defect
        return [worker.outcome for worker in self.workers]

    def choose(self) -> None:
        """Choose the worker whose turn is next: `chosen`, None where nothing can go on."""
        self.chosen = None
        try:
            while any(worker.is_running and not worker.has_stopped for worker in self.workers):
                self.deliver()
                ready = [worker for worker in self.workers if worker.is_ready]
                if ready:
                    self.chosen = self.random.choice(ready)
                    return
                if not self.let_time_pass():
                    self.give_up()
        except AssertionError as defect:  # no worker may take it for an error of its own
            self.defect = defect

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
        return True

    def give_up(self) -> None:
        """Nothing can arrive any more: all that wait have waited for the timeout."""
        for worker in self.workers:
            worker.has_timed_out = not worker.has_stopped

    def end(self, rank: int, *, is_killed: bool) -> None:
        """Let a worker that is gone take nothing more; if killed, drop what it has not delivered."""
        for pair, receives in self.expected.items():
            if pair[1] == rank:
                receives.clear()
        for pair, messages in self.sent.items():
            if pair[1] == rank or (is_killed and pair[0] == rank):
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
        try:
            self._take_over()
            self.outcome.value = work(Job(CPU, transport=self))
        except BaseException as error:
            self.outcome.error = error
        self.is_running = False
        self.world.end(self.rank, is_killed=isinstance(self.outcome.error, Killed))
        if not self.world.is_over:
            self.world.choose()
            self.world.turn_is_back.release()

    @property
    def is_ready(self) -> bool:
        return self.is_running and not self.has_stopped and (self.has_timed_out or self.condition())

    def take_turn(self) -> None:
        """Run until another worker is chosen."""
        self.turn.release()
        assert self.world.turn_is_back.acquire(timeout=_LONGEST_S), f"worker {self.rank} hangs outside waits"

    def _take_over(self) -> None:
        """Wait for the turn, and take up the generators as this worker left them."""
        self.turn.acquire()
        if self.world.is_over:
            raise Killed
        self.streams.restore()

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Pass the turn on until the condition holds; say whether it does, and not the timeout came first."""
        self.condition = condition
        self.world.choose()
        if self.world.chosen is not self:
            self.streams = GlobalStreams.capture(CPU)
            self.world.turn_is_back.release()
            self._take_over()
        self.condition = lambda: True
        timed_out, self.has_timed_out = self.has_timed_out, False
        return condition() or not timed_out

    def release(self) -> None:
        """End a thread that waits for a turn that never comes."""
        if self.thread.is_alive():
            self.turn.release()
            self.thread.join(_LONGEST_S)

    def note_event(self, kind: str, what: str) -> None:
        self.num_events += 1
        self.world.events.append((self.rank, kind, what, self.world.time))
        # From then on: what runs while the exception passes sends nothing either.
        if self.world.is_over or self.num_events >= self.world.faults.killed.get(self.rank, math.inf):
            raise Killed
        if self.world.faults.stopped.get(self.rank) == self.num_events:
            self.has_stopped = True
            self.wait_until(lambda: False)

    def lost_sources(self, peers: Iterable[int]) -> list[int]:
        """Return those of whom nothing can arrive any more."""
        return [peer for peer in self.lost_targets(peers) if not self.world.sent[peer, self.rank]]

    def lost_targets(self, peers: Iterable[int]) -> list[int]:
        """Return those who will take nothing any more."""
        return [peer for peer in peers if not self.world.workers[peer].is_running]

    # ---- what `Transport` asks for ---------------------------------------------------------------------

    def post(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> Posted:
        self.note_event("post", what)
        to_fill = {source: filled for source, tensors in incoming.items() if (filled := not_empty(tensors))}
        to_send = {target: content for target, tensors in outgoing.items() if (content := not_empty(tensors))}
        lost = [*self.lost_sources(to_fill), *self.lost_targets(to_send)]
        if lost and self.world.random.random() < 0.5:
            raise LostWorkerError(f"{what}: worker {lost[0]} is gone at {self.world.time}")
        received = {source: Receive(tensors) for source, tensors in to_fill.items()}
        for source, receive in received.items():
            for tensor in receive.tensors:
                assert tensor.is_contiguous()
                as_bytes(tensor).fill_(GARBAGE)
            self.world.expected[source, self.rank].append(receive)
        sent = {target: self.world.send(self.rank, target, tensors) for target, tensors in to_send.items()}
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
        self.worker.note_event("wait", self.what)
        has_all = self.worker.wait_until(lambda: self._is_done or bool(self._lost))
        if not self._is_done:
            lost = self._lost
            who, how = (f"worker {lost[0]}", "is gone") if lost else ("another worker", "did not answer")
            assert lost or not has_all
            raise LostWorkerError(f"{self.what}: {who} {how} at {self.worker.world.time}")
        self.received.clear()
        self.sent.clear()

    @property
    def _is_done(self) -> bool:
        return all(each.has_arrived for each in (*self.received.values(), *self.sent.values()))

    @property
    def _lost(self) -> list[int]:
        sources = [rank for rank, receive in self.received.items() if not receive.has_arrived]
        targets = [rank for rank, message in self.sent.items() if not message.has_arrived]
        return [*self.worker.lost_sources(sources), *self.worker.lost_targets(targets)]
