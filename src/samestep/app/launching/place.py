"""The place of one host's workers in a job: their ranks, numbers and environment."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.workers.environment import JOB, rank_environment

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["OneHost", "Place"]


@dataclass(frozen=True)
class Place:
    """The place of one host's workers in a job.

    Attributes:
        job: the unique name of the job.
        host: the number of this host among all hosts that the job has had.
        address: host and port of the store.
        first_rank: the rank of the first worker on this host.
        world_size: number of workers in the job; if this host joins a job that has begun, its own workers.
        members: the numbers of the first workers, in order of rank; None if this host joins.
    """

    job: str
    host: int
    address: tuple[str, int]
    first_rank: int
    world_size: int
    members: Sequence[int] | None

    def environment(self, local_rank: int, local_world_size: int) -> dict[str, str]:
        """Return the environment of the worker with this local rank.

        A worker beyond the largest number of workers starts as a newcomer, which waits until one is lost.
        """
        rank, world_size = self.first_rank + local_rank, self.world_size
        if rank >= world_size:
            rank, world_size = local_rank, local_world_size
        return {
            **rank_environment(rank, world_size, *self.address),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            JOB: self.job,
        }


class OneHost:
    """The place of the only host of a job, with the interface of `Rendezvous`.

    Args:
        listener: the socket on which the store will listen.
        num_workers: number of workers in the job.
    """

    def __init__(self, listener: socket.socket, num_workers: int) -> None:
        host, port = listener.getsockname()[:2]
        self.place = Place(secrets.token_hex(4), 0, (host, port), 0, num_workers, range(num_workers))
        self.has_store = True
        self._listener = listener

    def open(self) -> Store:
        """Open the store, which imports torch."""
        from samestep.workers.store import open_store

        return open_store(self._listener)

    def close(self) -> None:
        """Do nothing: no other host can join."""

    def leave(self) -> None:
        """Do nothing."""
