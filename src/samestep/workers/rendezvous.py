"""How workers find each other: they make a process group of exactly those that were started together."""

from __future__ import annotations

import gc
import math
import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import ConfigError, LostWorkerError, shown, warn
from samestep.memory.shared_memory import SharedMemory
from samestep.streams import GlobalStreams
from samestep.workers import environment
from samestep.workers.collectives import gather_objects
from samestep.workers.device import gpu_of
from samestep.workers.environment import JOB, NUMBER
from samestep.workers.meeting import meet
from samestep.workers.members import Generation, Key, Members
from samestep.workers.store import reach_store
from samestep.workers.transport import (
    Alone,
    Pending,
    ProcessGroup,
    Tensors,
    Transport,
    how_lost,
    is_lost_connection,
)
from samestep.workers.waiter import Patience, in_thread

__all__ = ["Generations", "has_group", "join", "num_messages"]

_POLL_S = 0.01
_MAKE_S = 30.0
"""Time limit for connecting workers that have found each other."""

_MAKE_AGAIN_S = 1.0
"""The first limit when regrouping: a worker may just have been lost, which gloo does not notice."""

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
        _in_thread(partial(_make_group_from_store, gpu_of(device), timeout_s), where)
    if not has_group():
        return Alone()
    transport = ProcessGroup(device, timeout_s, is_own=is_own)
    _connect(transport)
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


class Generations:
    """The transport of a job whose launcher replaces lost workers: it connects one generation at a time.

    Args:
        device: this worker's device.
        timeout_s: how long to wait for another worker.
        where: the beginning of errors during the start, such as "start of 4 workers".

    Attributes:
        members: this worker's view of the lists of workers.
    """

    def __init__(self, device: torch.device, timeout_s: float, where: str) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._group: Transport = Alone()
        self._has_finished = self.is_closed = False
        self._job = os.environ[JOB]
        store = PrefixStore(self._job, _in_thread(partial(reach_store, timeout_s), where))
        self.members = Members(store, int(os.environ[NUMBER]))
        if self.members.are_known:
            self._meet(self._next_store(where), where, _MAKE_S)

    @property
    def rank(self) -> int:
        """This worker's rank in its generation."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of workers in its generation."""
        return self._group.world_size

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory to send from; see `Transport`."""
        return self._group.empty(size, like)

    def post(self, outgoing: Tensors, incoming: Tensors, what: str) -> Pending:
        """Start to send and receive; see `Transport`."""
        return self._group.post(outgoing, incoming, what)

    def give_up(self, what: str) -> None:
        """Post no more messages; see `Transport`."""
        self._group.give_up(what)

    def close(self) -> None:
        """Leave the job."""
        self.is_closed = True
        gc.collect()  # frees groups of earlier generations, too: see `ProcessGroup.close`
        if isinstance(self._group, ProcessGroup):
            self._group.leave()

    def is_outside(self) -> bool:
        """Whether this worker is a newcomer; see `Renewable`."""
        return self.members.current.number < 0

    def is_due(self) -> bool:
        """Whether there is a newer list of members; see `Renewable`."""
        return self.members.has_newer()

    def term(self) -> tuple[str, int]:
        """Return the job's name, and the number of this generation; see `Renewable`."""
        return self._job, self.members.current.number

    def can_go_on(self) -> None:
        """Report that this worker can continue from now on if others are lost."""
        self.members.say(Key.GOES_ON)

    def finish(self) -> None:
        """Report that all work that others could take over is done."""
        self._has_finished = True
        self.members.finish()

    def has_finished(self) -> bool:
        """Whether this worker has called `finish`."""
        return self._has_finished

    def send_away(self, ranks: Sequence[int]) -> None:
        """End newcomers; see `Renewable`."""
        members = self.members.current.members
        for rank in ranks:
            self.members.say(Key.AWAY, members[rank])
        if self.rank in ranks:
            self._leave()
            self.members.current = Generation(-1, ())

    def regroup(self) -> None:
        """Form a new group; see `Renewable`."""
        where = "regrouping the workers"
        if self.is_outside():
            self.members.say(Key.READY)
        self._leave()
        make_s = _MAKE_AGAIN_S
        while True:
            store = self._next_store(where)
            try:
                return self._meet(store, where, make_s)
            except LostWorkerError:  # another worker was lost meanwhile, or connecting took too long
                self._leave()
                self.members.say(Key.AGAIN, self.members.current.number)
                make_s = min(2 * make_s, _MAKE_S)

    def _next_store(self, where: str) -> Store:
        return _in_thread(partial(self.members.advance, self._timeout_s), where)

    def _meet(self, store: Store, where: str, make_s: float) -> None:
        """Form the group of all members, which use this store; connecting may take `make_s` seconds."""
        rank, world_size = self.members.rank, len(self.members.current.members)
        if world_size > 1:
            make_s = min(make_s, self._timeout_s)
            store.set_timeout(timedelta(seconds=make_s))
            gpu = gpu_of(self._device)
            _in_thread(partial(_make_group, store, gpu, rank, world_size, self._timeout_s, make_s), where)
            store.set_timeout(timedelta(seconds=self._timeout_s))
            self._group = ProcessGroup(self._device, self._timeout_s)
            _connect(self._group, self.members.loss)

    def _leave(self) -> None:
        if isinstance(self._group, ProcessGroup):
            if self._group.waiter.silent is not None:
                self.members.accuse(self._group.waiter.silent)
            self.members.report_cut(self._group.waiter.peers.cut())
            self._group.leave()
        self._group = Alone()
        # After a failed attempt, torch's counter of group names is ahead of other workers'. Destroying a
        # group resets it.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def _connect(transport: ProcessGroup, ask: Callable[[], str | None] | None = None) -> None:
    transport.waiter.peers.ask_launchers = ask
    transport.waiter.peers, channels = meet(transport, shares_memory=transport.is_on_cpu)
    transport.waiter.peers.ask_launchers = ask
    transport.shared = SharedMemory(transport.rank, channels)


def _in_thread(work: Callable[[], T], where: str) -> T:
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


def _make_group_from_store(gpu: str, timeout_s: float) -> None:
    store, rank, num_workers = reach_store(timeout_s), environment.rank(), environment.world_size()
    name = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    prefix = (
        _announce_first(store, name, num_workers, timeout_s)
        if rank == 0
        else _find_first(store, name, rank, timeout_s)
    )
    make_s = min(timeout_s, _MAKE_S)
    _make_group(PrefixStore(f"samestep/{prefix}", store), gpu, rank, num_workers, timeout_s, make_s)


def _make_group(store: Store, gpu: str, rank: int, world_size: int, timeout_s: float, make_s: float) -> None:
    """Make torch's process group of all workers that use this store."""
    backend = _agree_on_backend(store, gpu, rank, world_size)
    # NCCL's timeout also limits how long a worker may compute between messages, gloo's only connecting.
    timeout = timedelta(seconds=timeout_s if "nccl" in backend else make_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


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


def _agree_on_backend(store: Store, gpu: str, rank: int, world_size: int) -> str:
    """Return the backends: NCCL for CUDA tensors if every worker has its own GPU, otherwise gloo alone.

    gloo sends CUDA tensors through host memory. NCCL does not allow two workers on one GPU.
    """
    store.set(f"gpu/{rank}", gpu)
    gpus = [seen.decode() for seen in store.multi_get([f"gpu/{worker}" for worker in range(world_size)])]
    shared = _shared(gpus)
    if shared and rank == 0:
        warn(
            f"{shared} share one GPU: all gradients travel through host memory (gloo instead of NCCL); give "
            "each worker a GPU of its own"
        )
    return "cpu:gloo,cuda:nccl" if all(gpus) and not shared else "gloo"


def _shared(gpus: Sequence[str]) -> str:
    """Return, in words, which workers share a GPU, for the first shared one; empty if none is shared."""
    gpu = next((gpu for gpu in gpus if gpu and gpus.count(gpu) > 1), None)
    sharing = [str(worker) for worker, other in enumerate(gpus) if other == gpu]
    return f"workers {', '.join(sharing[:-1])} and {sharing[-1]}" if sharing else ""
