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

    The last one starts: so what stand-ins share is not left to them by the towers that come before.
    """
    if num_workers == 1:
        return [work(job)]
    outside = GlobalStreams.capture(job.device)
    team = _Team([], {}, threading.Semaphore(0))
    team.members += [_StandIn(rank, num_workers, team, work, job, outside) for rank in range(num_workers)]
    try:
        with TorchDispatchMode():  # its end puts back flags of torch's that modes in threads leave mixed up
            while running := [member for member in reversed(team.members) if member.is_running]:
                next((member for member in running if member.is_ready), running[0]).take_turn()
    finally:
        team.end()
        outside.restore()
    return [member.result for member in team.members]


@dataclass
class _Team:
    """What stand-ins share: each other, what they sent, by (source, target), and who runs."""

    members: list[_StandIn]
    sent: dict[tuple[int, int], list[list[Tensor]]]
    turn_is_back: threading.Semaphore
    is_over: bool = False

    def end(self) -> None:
        """Let nobody wait any more."""
        self.is_over = True
        for member in self.members:
            member.turn.release()


class _StandIn:
    """One of the threads, and its transport."""

    def __init__(  # noqa: PLR0913
        self,
        rank: int,
        world_size: int,
        team: _Team,
        work: Callable[[Job], Any],
        job: Job,
        streams: GlobalStreams,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.turn = threading.Semaphore(0)
        self.is_running = True
        self.result: Any = None
        self._team = team
        self._job = replace(job, transport=self)
        self._streams = streams
        self._num_received = [0] * world_size
        self._is_ready: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether it need not wait."""
        return self._is_ready()

    def take_turn(self) -> None:
        """Run until a message is missing, or to the end."""
        if self._thread.ident is None:
            self._thread.start()
        self.turn.release()
        self._team.turn_is_back.acquire()

    def _run(self, work: Callable[[Job], Any]) -> None:
        try:
            self._take_over()
            if self._job.device.type == "cuda":
                torch.cuda.set_device(self._job.device)
            self.result = work(self._job)
        except BaseException as error:
            self.result = error
        self.is_running = False
        self._team.turn_is_back.release()

    def _take_over(self) -> None:
        """Wait for the turn, and take up the process's generators as this worker left them."""
        self.turn.acquire()
        if self._team.is_over:
            raise KeyboardInterrupt
        self._streams.restore()

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> _Posted:
        """Send copies, and note what to receive; see `Transport`."""
        for target, tensors in _not_empty(outgoing).items():
            copies = [tensor.detach().clone() for tensor in tensors]
            self._team.sent.setdefault((self.rank, target), []).append(copies)
        expected = _not_empty(incoming)
        numbers = {source: self._num_received[source] for source in expected}
        for source in expected:
            self._num_received[source] += 1
        return _Posted(self, expected, numbers, what)

    def receive(self, source: int, number: int, what: str) -> list[Tensor]:
        """Return a message, for which other stand-ins may have to run."""
        messages = self._team.sent.setdefault((source, self.rank), [])
        self._is_ready = lambda: len(messages) > number
        if not self.is_ready:
            self._streams = GlobalStreams.capture(self._job.device)
            self._team.turn_is_back.release()
            self._take_over()
        if not self.is_ready:  # and nobody else is
            raise LostWorkerError(f"{what}: worker {source} is gone")
        message, messages[number] = messages[number], []
        self._is_ready = lambda: True
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
