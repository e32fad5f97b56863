"""torch's default process group: whether there is one, and how workers that share a store make it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.errors import ConfigError, LostWorkerError, shown, warn
from samestep.workers.process_group import how_lost, is_lost_connection
from samestep.workers.waiter import in_thread

__all__ = ["MAKE_S", "has_group", "make_group", "num_messages", "run_interruptibly"]

MAKE_S = 30.0
"""Time limit for connecting workers that have found each other."""

T = TypeVar("T")


def has_group() -> bool:
    """Whether torch's default process group has several workers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def num_messages() -> int:
    """Return how many messages and collectives torch's default process group has started so far."""
    group: Any = dist.group.WORLD if dist.is_available() else None
    if group is None:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # the backend does not count them
        return 0


def run_interruptibly(work: Callable[[], T], where: str) -> T:
    """Run work that waits for other workers in a thread, so that it can be interrupted."""
    try:
        return in_thread(work, math.inf)  # each wait inside has its own timeout
    except LostWorkerError as error:
        raise LostWorkerError(f"{where}: {error}") from None
    except Exception as error:
        if "enforce fail" in str(error):  # gloo failed before it connected
            chosen = os.environ.get("GLOO_SOCKET_IFNAME")
            raise ConfigError(
                f"{where}: gloo cannot use the network (GLOO_SOCKET_IFNAME = {shown(chosen)}): expected the "
                "name of an interface that is up, as `ip link` lists them, or none"
            ) from error
        if is_lost_connection(error):
            raise LostWorkerError(f"{where}: {how_lost(error)}") from error
        raise


def make_group(store: Store, gpu: str, rank: int, world_size: int, timeout_s: float, make_s: float) -> None:
    """Make torch's process group of all workers that use this store."""
    backend = _agree_on_backend(store, gpu, rank, world_size)
    # NCCL's timeout also limits how long a worker may compute between messages, gloo's only connecting.
    timeout = timedelta(seconds=timeout_s if "nccl" in backend else make_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _agree_on_backend(store: Store, gpu: str, rank: int, world_size: int) -> str:
    """Return the backends: NCCL for CUDA tensors if all workers have it and a GPU each, otherwise gloo alone.

    gloo sends CUDA tensors through host memory. NCCL does not allow two workers on one GPU.
    """
    store.set(f"gpu/{rank}", f"{dist.is_nccl_available():d}{gpu}")
    found = [seen.decode() for seen in store.multi_get([f"gpu/{worker}" for worker in range(world_size)])]
    gpus = [each[1:] for each in found]
    without_nccl = [worker for worker, each in enumerate(found) if each[0] == "0"]
    shared = _shared(gpus)
    if shared and rank == 0:
        warn(
            f"{shared} share one GPU: all gradients travel through host memory (gloo instead of NCCL); give "
            "each worker a GPU of its own"
        )
    if not all(gpus) or shared:
        return "gloo"
    if without_nccl and rank == 0:
        warn(
            f"the PyTorch of worker {without_nccl[0]} has no NCCL: all gradients travel through host memory "
            "(gloo instead of NCCL); install a PyTorch that was built with NCCL"
        )
    return "gloo" if without_nccl else "cpu:gloo,cuda:nccl"


def _shared(gpus: Sequence[str]) -> str:
    """Return, in words, which workers share a GPU, for the first shared one; empty if none is shared."""
    gpu = next((gpu for gpu in gpus if gpu and gpus.count(gpu) > 1), None)
    sharing = [str(worker) for worker, other in enumerate(gpus) if other == gpu]
    return f"workers {', '.join(sharing[:-1])} and {sharing[-1]}" if sharing else ""
