"""Where one host's workers are in a job, and how that is found where it is the only host."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.workers.environment import JOB, seat_environment

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["OneHost", "Place"]


@dataclass(frozen=True)
class Place:
    """Where one host's workers are in a job.

    Attributes:
        job: its name, which no other job has.
        host: number of this host, of all that the job has had.
        address: of the store in which all meet.
        first_rank: of the first worker here.
        world_size: workers in the job; those of this host where it joins a job that has begun.
        members: the first list of workers; None where this host joins.
    """

    job: str
    host: int
    address: tuple[str, int]
    first_rank: int
    world_size: int
    members: Sequence[int] | None

    def environment(self, seat: int, num_seats: int) -> dict[str, str]:
        """Return the environment of the worker in one of this host's seats; one too many is a newcomer."""
        rank, world_size = self.first_rank + seat, self.world_size
        if rank >= world_size:
            rank, world_size = seat, num_seats
        return {
            **seat_environment(rank, world_size, *self.address),
            "LOCAL_RANK": str(seat),
            "LOCAL_WORLD_SIZE": str(num_seats),
            JOB: self.job,
        }


class OneHost:
    """The place of a job's only host, which has the store.

    Args:
        listener: where the store is to be.
        num_workers: of the job.
    """

    def __init__(self, listener: socket.socket, num_workers: int) -> None:
        host, port = listener.getsockname()[:2]
        self.place = Place(secrets.token_hex(4), 0, (host, port), 0, num_workers, range(num_workers))
        self.has_store = True
        self._listener = listener

    def open(self) -> Store:
        """Return the store; this imports torch."""
        from samestep.workers.store import open_store

        return open_store(self._listener)

    def close(self) -> None:
        """Do nothing: nobody can come."""

    def leave(self) -> None:
        """Do nothing."""
