"""Stand-ins: the workers of a job as threads of this process, of which one runs at a time.

Each has a model, an optimizer, a loss function and messages of its own, as real workers have. What a process
has for itself but its random generators, such as globals, they share.
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
    """Run `work` on each stand-in, and return what it returned or raised, by rank.

    The last one starts, so that what they share is not as one worker would leave it.
    """
    if num_workers == 1:
        return [work(job)]
    outside = GlobalStreams.capture(job.device)
    team: list[_StandIn] = []
    team += [_StandIn(rank, num_workers, team, outside) for rank in range(num_workers)]
    for member in team:
        member.start(work, job)
    try:
        with TorchDispatchMode():  # its end puts back flags of torch's that modes in threads leave mixed up
            while running := [member for member in reversed(team) if member.is_running]:
                next((member for member in running if member.is_ready()), running[0]).take_turn()
    finally:
        for member in team:
            member.end()
        outside.restore()
    return [member.result for member in team]


class _StandIn:
    """One of the threads, and its transport."""

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
        """Begin, and wait for the first turn."""
        own = replace(job, transport=self)
        threading.Thread(target=self._run, args=(work, own), daemon=True).start()

    def take_turn(self) -> None:
        """Run until a message is missing, or to the end."""
        self._turn.release()
        self._turn_is_over.acquire()

    def end(self) -> None:
        """Stop at the next message that is missing."""
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
        """Wait for the turn, and take up the process's generators as this worker left them."""
        self._turn.acquire()
        if not self.is_running:
            raise KeyboardInterrupt
        self._streams.restore()

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return new memory."""
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
        """Whether it has left, which it never does by itself."""
        return False

    def give_up(self, what: str) -> None:
        """Do nothing: an interrupt ends them all."""

    def receive(self, source: int, number: int, what: str) -> list[Tensor]:
        """Return a message, for which other stand-ins may have to run."""
        messages = self.inbox[source]
        self.is_ready = lambda: len(messages) > number
        if not self.is_ready():
            self._streams = GlobalStreams.capture(self._streams.device)
            self._turn_is_over.release()
            self._take_over()
        if not self.is_ready():  # and nobody else is
            raise LostWorkerError(f"{what}: worker {source} is gone")
        message, messages[number] = messages[number], []
        return message

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class _Posted:
    """Messages to a stand-in: by source, what they fill and their numbers."""

    receiver: _StandIn
    expected: Mapping[int, Sequence[Tensor]]
    numbers: Mapping[int, int]
    what: str

    def wait(self) -> None:
        """Fill what was to be received."""
        for source, tensors in self.expected.items():
            message = self.receiver.receive(source, self.numbers[source], self.what)
            for tensor, sent in zip(tensors, message, strict=True):
                tensor.copy_(sent)


def _not_empty(messages: Tensors) -> dict[int, list[Tensor]]:
    kept = {rank: [tensor for tensor in tensors if tensor.numel()] for rank, tensors in messages.items()}
    return {rank: tensors for rank, tensors in kept.items() if tensors}
