"""How tensors go between workers: point to point, so that the network does no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Alone", "Pending", "Renewable", "Tensors", "Transport"]

Tensors = Mapping[int, Sequence[Tensor]]
"""Contiguous tensors, in the order in which they are sent, by the rank of the other worker."""


class Pending(Protocol):
    """Messages that have been posted; their tensors must not be used before `wait` returns."""

    def wait(self) -> None:
        """Wait until all messages have been sent and received; with NCCL, the CUDA stream waits instead."""


class Transport(Protocol):
    """Sends tensors to the other workers and receives theirs; all messages between workers use `post`.

    Between two workers, messages arrive in the order in which they were posted. A message must be received
    with the sizes and the name with which it was sent; numbers in the name may differ.
    """

    @property
    def rank(self) -> int:
        """This worker's rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """The number of workers in the job, W."""

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job."""

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory for `size` elements with `like`'s dtype and device, from which sending is fastest.

        Write to it only before it is posted.
        """

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send `outgoing` and to receive `incoming`; `what` is the message's name in an error."""

    def give_up(self, what: str) -> None:
        """Post no more messages: an interrupt has broken off `what`, and others may be waiting for it."""

    def close(self) -> None:
        """Leave the job; nothing may be posted afterwards."""


@runtime_checkable
class Renewable(Transport, Protocol):
    """A transport whose workers may change: some are lost, and newcomers join."""

    def is_outside(self) -> bool:
        """Whether this worker is a newcomer that has not joined the others yet; until then it is alone."""

    def is_due(self) -> bool:
        """Whether all workers should call `regroup`, because there are newcomers."""

    def term(self) -> tuple[str, int]:
        """Return the job's name, which is unique, and the number of the current generation of workers."""

    def can_go_on(self) -> None:
        """Report that this worker can continue after a loss from now on: it will call `regroup`."""

    def finish(self) -> None:
        """Report that all work that others could take over is done: no call of `regroup` follows."""

    def has_finished(self) -> bool:
        """Whether this worker has called `finish`."""

    def send_away(self, ranks: Sequence[int]) -> None:
        """End newcomers that cannot start from the others' state; they or other workers may call this."""

    def regroup(self) -> None:
        """Form a new group with the current workers; `rank` and `world_size` may change.

        All workers must call this, after a loss or when `is_due`. Messages posted before are lost.

        Raises:
            LostWorkerError: the other workers do not call this.
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
