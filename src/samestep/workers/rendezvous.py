"""Workers find each other: the process group of exactly those that were started together."""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.device import gpu_of
from samestep.workers.environment import world_size
from samestep.workers.meeting import meet
from samestep.workers.store import reach_store
from samestep.workers.transport import Alone, ProcessGroup, Transport, how_lost, is_lost_connection
from samestep.workers.waiter import Patience, Waiter

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
        _make_group(gpu_of(device), timeout_s)
    transport = ProcessGroup(device, timeout_s)
    transport.waiter.peers = meet(transport)
    return transport


def _make_group(gpu: str, timeout_s: float) -> None:
    """Make torch's process group: in a thread, so that an interrupt ends the wait for the others."""
    waiter = Waiter(math.inf)  # each of its waits has its own timeout
    waiting = waiter.start([(None, partial(_meet_in_store, gpu, timeout_s))])
    waiter.finish(waiting)
    waiter.close()
    error, where = waiting.error, f"start of {world_size()} workers"
    if isinstance(error, LostWorkerError):
        raise LostWorkerError(f"{where}: {error}")
    if error is not None and is_lost_connection(error):
        raise LostWorkerError(f"{where}: {how_lost(error)}") from error
    if error is not None:
        raise error


def _meet_in_store(gpu: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = reach_store(timeout_s)
    store.set_timeout(timeout)
    name = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    prefix = (
        _gather(store, name, world_size, timeout_s) if rank == 0 else _follow(store, name, rank, timeout_s)
    )
    store = PrefixStore(f"samestep/{prefix}", store)
    backend = _agree_on_backend(store, gpu, rank, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _gather(store: Store, name: str, world_size: int, timeout_s: float) -> str:
    """Send worker 0's name to the others, until all have received it, and say so; return it."""
    patience = Patience(timeout_s)
    missing = list(range(1, world_size))
    while missing and not patience.is_over():
        for rank in missing:
            if store.check([f"samestep/here/{rank}"]):
                seen = store.get(f"samestep/here/{rank}").decode()  # perhaps one that is gone
                store.set(f"samestep/follow/{seen}", name)
        missing = [rank for rank in missing if not store.check([f"samestep/heard/{name}/{rank}"])]
        time.sleep(_POLL_S if missing else 0)
    who = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    failure = f"{who} did not join within {timeout_s:g} s" if missing else ""
    store.set(f"samestep/met/{name}", failure)
    if failure:
        raise LostWorkerError(failure)
    return name


def _follow(store: Store, name: str, rank: int, timeout_s: float) -> str:
    """Wait for worker 0 to see this one, and then all others; return its name."""
    store.set(f"samestep/here/{rank}", name)
    first = _wait_for_first(store, f"samestep/follow/{name}", timeout_s)
    store.set(f"samestep/heard/{first}/{rank}", "")
    failure = _wait_for_first(store, f"samestep/met/{first}", timeout_s)
    if failure:
        raise LostWorkerError(failure)
    return first


def _wait_for_first(store: Store, key: str, timeout_s: float) -> str:
    """Wait for what worker 0 writes; not in the store, which counts the time in which nobody runs."""
    patience = Patience(timeout_s)
    while not store.check([key]):
        if patience.is_over():
            raise LostWorkerError(f"worker 0 did not join within {timeout_s:g} s")
        time.sleep(_POLL_S)
    found: str = store.get(key).decode()
    return found


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
