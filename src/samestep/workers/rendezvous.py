"""Workers find each other: the process group of exactly those that were started together."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.device import gpu_of
from samestep.workers.environment import world_size
from samestep.workers.store import reach_store
from samestep.workers.transport import Alone, ProcessGroup, Transport, is_lost_connection, lost_worker

__all__ = ["has_group", "join"]

_POLL_S = 0.01


def has_group() -> bool:
    """Whether this process is one of several workers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def join(device: torch.device, timeout_s: float) -> Transport:
    """Join the workers that torch's environment variables name, and return the transport to them.

    torch's elastic agent keeps its store when it restarts workers, and with it the addresses of those
    before; see pytorch#135712. So the workers first agree on an unused prefix: worker 0's own name, which
    it sends to every process that it sees, until one for each rank has received it.
    """
    if world_size() == 1:
        return Alone()
    if not dist.is_initialized():
        try:
            _make_group(gpu_of(device), timeout_s)
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            what = f"start of {world_size()} workers"
            raise lost_worker(what, "another worker", timeout_s, error) from error
    return ProcessGroup(device, timeout_s)


def _make_group(gpu: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = reach_store(timeout_s)
    store.set_timeout(timeout)
    name = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    prefix = _gather(store, name, world_size, timeout_s) if rank == 0 else _follow(store, name, rank)
    store = PrefixStore(f"samestep/{prefix}", store)
    backend = _agree_on_backend(store, gpu, rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _gather(store: Store, name: str, world_size: int, timeout_s: float) -> str:
    """Send worker 0's name to the others, until all have received it; return it."""
    deadline_s = time.monotonic() + timeout_s
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"samestep/here/{rank}"]):
                seen = store.get(f"samestep/here/{rank}").decode()  # perhaps one that is gone
                store.set(f"samestep/follow/{seen}", name)
        missing = [rank for rank in missing if not store.check([f"samestep/heard/{name}/{rank}"])]
        if missing and time.monotonic() > deadline_s:
            who = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise LostWorkerError(f"start of {world_size} workers: {who} did not join within {timeout_s:g} s")
        time.sleep(_POLL_S if missing else 0)
    return name


def _follow(store: Store, name: str, rank: int) -> str:
    """Wait for worker 0 to see this one; return its name."""
    store.set(f"samestep/here/{rank}", name)
    first: str = store.get(f"samestep/follow/{name}").decode()
    store.set(f"samestep/heard/{first}/{rank}", "")
    return first


def _agree_on_backend(store: Store, gpu: str, rank: int, world_size: int) -> str:
    """Return NCCL for GPUs, where every worker has one of its own: however many of them each worker sees.

    Otherwise gloo, which carries CUDA tensors through host memory. NCCL refuses two workers on one GPU.
    """
    store.set(f"gpu/{rank}", gpu)
    gpus = [seen.decode() for seen in store.multi_get([f"gpu/{worker}" for worker in range(world_size)])]
    shared = _shared(gpus)
    if shared and rank == 0:
        warnings.warn(
            f"{shared} compute on one GPU: all gradients travel through host memory (gloo instead of NCCL); "
            "give each worker a GPU of its own",
            stacklevel=5,
        )
    return "cpu:gloo,cuda:nccl" if all(gpus) and not shared else "gloo"


def _shared(gpus: Sequence[str]) -> str:
    """Name the workers that share the first GPU that several have; nothing where none is shared."""
    gpu = next((gpu for gpu in gpus if gpu and gpus.count(gpu) > 1), None)
    sharing = [str(worker) for worker, other in enumerate(gpus) if other == gpu]
    return f"workers {', '.join(sharing[:-1])} and {sharing[-1]}" if sharing else ""
