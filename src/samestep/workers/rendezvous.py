"""How workers find each other: they make a process group of exactly those that were started together."""

from __future__ import annotations

import os
import pickle
import socket
import time
import weakref
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import ConfigError, LostWorkerError
from samestep.streams import GlobalStreams
from samestep.workers import environment
from samestep.workers.collectives import gather_objects
from samestep.workers.default_group import MAKE_S, has_group, make_group, run_interruptibly
from samestep.workers.device import gpu_of
from samestep.workers.environment import NUMBER
from samestep.workers.generations import Generations
from samestep.workers.process_group import ProcessGroup
from samestep.workers.store import reach_store
from samestep.workers.transport import Alone, Transport
from samestep.workers.waiter import Patience

__all__ = ["join"]

_POLL_S = 0.01


def join(device: torch.device, timeout_s: float) -> Transport:
    """Join the workers of torch's default process group, or those in the environment variables.

    When torch's elastic agent restarts workers, its store keeps the addresses of the earlier ones: see
    https://github.com/pytorch/pytorch/issues/135712. So the workers first agree on an unused prefix: worker
    0's own name, which it sends to every process that it sees, until one of each rank has received it.
    """
    last = _Joined.last
    if last is None or last.transport.is_closed or not last.is_current:
        _Joined.last = last = _Joined(_join(device, timeout_s))
        _share_generators(last.transport, device)
    return last.transport


def _share_generators(transport: Transport, device: torch.device) -> None:
    """Set the global generators to worker 0's, so that all workers draw the same numbers from now on."""
    generations = transport if isinstance(transport, Generations) else None
    if generations is not None and generations.is_outside():
        kept = generations.members.streams()
        state = None if kept is None else pickle.loads(kept)
    else:
        own = GlobalStreams.capture(device).state_dict() if transport.rank == 0 else None
        state, *_ = gather_objects(transport, own, "the first worker's random generators")
        if generations is not None and own is not None:
            generations.members.keep_streams(pickle.dumps(own))
    if state is not None:
        GlobalStreams.from_state_dict(state, device).restore()


class _Joined:
    """The workers that this process has joined, for later calls of `join`."""

    last: ClassVar[_Joined | None] = None

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._group = weakref.ref(dist.group.WORLD) if isinstance(transport, ProcessGroup) else None

    @property
    def is_current(self) -> bool:
        """Whether the group is still torch's default group: a program may destroy it and make another."""
        if self._group is None:
            return isinstance(self.transport, Generations)
        return self._group() is dist.group.WORLD


def _join(device: torch.device, timeout_s: float) -> Transport:
    where = f"start of {environment.world_size()} workers"
    if NUMBER in os.environ:
        generations = Generations(device, timeout_s, where)
        del os.environ[NUMBER]  # so that child processes do not take it for their own
        return generations
    is_own = not dist.is_initialized()
    if not is_own:
        _check_group()
    elif environment.world_size() > 1:
        run_interruptibly(partial(_make_group_from_store, gpu_of(device), timeout_s), where)
    if not has_group():
        return Alone()
    transport = ProcessGroup(device, timeout_s, is_own=is_own)
    transport.connect()
    return transport


def _check_group() -> None:
    """Raise if the program's own process group does not match the launcher's workers."""
    found = dist.get_rank(), dist.get_world_size()
    expected = environment.rank(), environment.world_size()
    if environment.under_launcher() and found != expected:
        raise ConfigError(
            f"this worker is rank {found[0]} of {found[1]} in torch's process group, but the environment has "
            f"RANK={expected[0]}, WORLD_SIZE={expected[1]}: expected the same; or let samestep.init() make "
            "the group"
        )


def _make_group_from_store(gpu: str, timeout_s: float) -> None:
    store, rank, num_workers = reach_store(timeout_s), environment.rank(), environment.world_size()
    name = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    prefix = (
        _announce_first(store, name, num_workers, timeout_s)
        if rank == 0
        else _find_first(store, name, rank, timeout_s)
    )
    make_s = min(timeout_s, MAKE_S)
    make_group(PrefixStore(f"samestep/{prefix}", store), gpu, rank, num_workers, timeout_s, make_s)


def _announce_first(store: Store, name: str, world_size: int, timeout_s: float) -> str:
    """Send worker 0's name to the others until all have received it, then announce the result; return it."""
    patience = Patience(timeout_s)
    missing = list(range(1, world_size))
    while missing and not patience.is_over():
        for rank in missing:
            if store.check([f"samestep/here/{rank}"]):
                seen = store.get(
                    f"samestep/here/{rank}"
                ).decode()  # may be the name of a process that is gone
                store.set(f"samestep/follow/{seen}", name)
        missing = [rank for rank in missing if not store.check([f"samestep/heard/{name}/{rank}"])]
        time.sleep(_POLL_S if missing else 0)
    who = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    failure = f"{who} did not join within {timeout_s:g} s" if missing else ""
    store.set(f"samestep/met/{name}", failure)
    if failure:
        raise LostWorkerError(failure)
    return name


def _find_first(store: Store, name: str, rank: int, timeout_s: float) -> str:
    """Wait until worker 0 has found this worker, and then all others; return worker 0's name."""
    store.set(f"samestep/here/{rank}", name)
    first = _wait_for_first(store, f"samestep/follow/{name}", timeout_s)
    store.set(f"samestep/heard/{first}/{rank}", "")
    failure = _wait_for_first(store, f"samestep/met/{first}", timeout_s)
    if failure:
        raise LostWorkerError(failure)
    return first


def _wait_for_first(store: Store, key: str, timeout_s: float) -> str:
    """Wait for a key that worker 0 sets; by polling, as the store's own timeout counts stopped time, too."""
    patience = Patience(timeout_s)
    while not store.check([key]):
        if patience.is_over():
            raise LostWorkerError(f"worker 0 did not join within {timeout_s:g} s")
        time.sleep(_POLL_S)
    found: str = store.get(key).decode()
    return found
