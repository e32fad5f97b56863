"""Stand-ins: the workers of a job as threads of this process, one of which runs at a time.

Like real workers, each has a model, an optimizer, a loss function, messages and random generators of its own.
All else that belongs to a process, such as globals, they share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.errors import LostWorkerError
from samestep.streams import GlobalStreams
from samestep.workers.job import Job
from samestep.workers.transport import Tensors

__all__ = ["run_stand_ins"]


def run_stand_ins(work: Callable[[Job], Any], job: Job, num_workers: int) -> list[Any]:
    """Run `work` on each stand-in, and return what each returned or raised, by rank.

    The last rank starts, because rank 0 would leave shared state as a single worker does, and hide faults.
    """
    if num_workers == 1:
        return [work(job)]
    outside = GlobalStreams.capture(job.device)
    team: list[_StandIn] = []
    team += [_StandIn(rank, num_workers, team, outside) for rank in range(num_workers)]
    for member in team:
        member.start(work, job)
    try:
        # Its exit restores torch's global flags, which modes in several threads mix up.
        with TorchDispatchMode():
            while running := [member for member in reversed(team) if member.is_running]:
                next((member for member in running if member.is_ready()), running[0]).take_turn()
    finally:
        for member in team:
            member.end()
        outside.restore()
    return [member.result for member in team]


class _StandIn:
    """A worker as a thread; also its transport."""

    def __init__(self, rank: int, world_size: int, team: Sequence[_StandIn], streams: GlobalStreams) -> None:
        self.rank = rank
        self.world_size = world_size
        self.inbox: list[list[list[Tensor]]] = [[] for _ in range(world_size)]  # messages by source
        self.is_ready: Callable[[], bool] = lambda: True
        self.is_running = True
        self.result: Any = None
        self._team = team
        self._streams = streams
        self._num_expected = [0] * world_size
        self._turn, self._turn_is_over = threading.Semaphore(0), threading.Semaphore(0)

    def start(self, work: Callable[[Job], Any], job: Job) -> None:
        """Start the thread, which waits for its first turn."""
        own = replace(job, transport=self)
        threading.Thread(target=self._run, args=(work, own), daemon=True).start()

    def take_turn(self) -> None:
        """Run until the thread waits for a message, or to its end."""
        self._turn.release()
        self._turn_is_over.acquire()

    def end(self) -> None:
        """End the thread at the message that it waits for."""
        self.is_running = False
        self._turn.release()

    def _run(self, work: Callable[[Job], Any], job: Job) -> None:
        try:
            self._take_over()
            if job.device.type == "cuda":
                torch.cuda.set_device(job.device)
            self.result = work(job)
        except BaseException as error:
            self.result = error
        self.is_running = False
        self._turn_is_over.release()

    def _take_over(self) -> None:
        """Wait for the next turn, and restore the global generators as this worker left them."""
        self._turn.acquire()
        if not self.is_running:
            raise KeyboardInterrupt
        self._streams.restore()

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory to send from; see `Transport`."""
        return like.new_empty(size)

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> _Posted:
        """Send copies, and note what to receive; see `Transport`."""
        for target, tensors in _not_empty(outgoing).items():
            self._team[target].inbox[self.rank].append([tensor.detach().clone() for tensor in tensors])
        expected = _not_empty(incoming)
        numbers = {source: self._num_expected[source] for source in expected}
        for source in expected:
            self._num_expected[source] += 1
        return _Posted(self, expected, numbers, what)

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job, which no stand-in does."""
        return False

    def give_up(self, what: str) -> None:
        """Do nothing: an interrupt ends all stand-ins."""

    def receive(self, source: int, number: int, what: str) -> list[Tensor]:
        """Return a message, after other stand-ins have run if it has not been sent yet."""
        messages = self.inbox[source]
        self.is_ready = lambda: len(messages) > number
        if not self.is_ready():
            self._streams = GlobalStreams.capture(self._streams.device)
            self._turn_is_over.release()
            self._take_over()
        if not self.is_ready():  # no stand-in is: the sender has ended
            raise LostWorkerError(f"{what}: worker {source} is gone")
        message, messages[number] = messages[number], []
        return message

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Posted:
    """Messages that a stand-in expects: by source, the tensors to fill and the message's number."""

    receiver: _StandIn
    expected: Mapping[int, Sequence[Tensor]]
    numbers: Mapping[int, int]
    what: str

    def wait(self) -> None:
        """Receive the messages."""
        for source, tensors in self.expected.items():
            message = self.receiver.receive(source, self.numbers[source], self.what)
            for tensor, sent in zip(tensors, message, strict=True):
                tensor.copy_(sent)


def _not_empty(messages: Tensors) -> dict[int, list[Tensor]]:
    kept = {rank: [tensor for tensor in tensors if tensor.numel()] for rank, tensors in messages.items()}
    return {rank: tensors for rank, tensors in kept.items() if tensors}
