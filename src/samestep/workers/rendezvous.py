"""Workers find each other: the process group of exactly those that were started together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from samestep.errors import LostWorkerError

__all__ = ["join"]

_POLL_S = 0.01


def join(backend: str, timeout_s: float) -> None:
    """Make the default process group of the workers that torch's environment variables speak of.

    torch's elastic agent keeps its store when it restarts workers, and with it the addresses of those
    before; see pytorch#135712. So the workers first agree on a prefix that nobody has used: worker 0's
    own name, which it tells to every process that it sees, until one for each rank has heard it.

    Args:
        backend: as for `torch.distributed.init_process_group`.
        timeout_s: seconds to wait for the others, and later for any message.

    Raises:
        LostWorkerError: worker 0 has waited in vain for some of the others.
        torch.distributed.DistError, RuntimeError: a worker was lost at another moment.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    name = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    prefix = _gather(store, name, world_size, timeout_s) if rank == 0 else _follow(store, name, rank)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"samestep/{prefix}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _gather(store: Store, name: str, world_size: int, timeout_s: float) -> str:
    """Tell worker 0's name to the others, until all have heard it; return it."""
    deadline_s = time.monotonic() + timeout_s
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"samestep/here/{rank}"]):
                seen = store.get(f"samestep/here/{rank}").decode()  # perhaps one that is gone
                store.set(f"samestep/follow/{seen}", name)
        missing = [rank for rank in missing if not store.check([f"samestep/heard/{name}/{rank}"])]
        if missing and time.monotonic() > deadline_s:
            raise LostWorkerError(
                f"start of {world_size} workers: {_names(missing)} did not come for {timeout_s:g} s"
            )
        time.sleep(_POLL_S if missing else 0)
    return name


def _follow(store: Store, name: str, rank: int) -> str:
    """Wait for worker 0 to see this one; return its name."""
    store.set(f"samestep/here/{rank}", name)
    first: str = store.get(f"samestep/follow/{name}").decode()
    store.set(f"samestep/heard/{first}/{rank}", "")
    return first


def _names(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
