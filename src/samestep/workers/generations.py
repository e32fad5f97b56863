"""The transport of a job whose launcher replaces lost workers."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.default_group import MAKE_S, make_group, run_interruptibly
from samestep.workers.device import gpu_of
from samestep.workers.environment import JOB, NUMBER
from samestep.workers.members import Generation, Key, Members
from samestep.workers.process_group import ProcessGroup
from samestep.workers.store import reach_store
from samestep.workers.transport import Alone, Pending, Tensors, Transport

__all__ = ["Generations"]

_MAKE_AGAIN_S = 1.0
"""The first limit when regrouping: a worker may just have been lost, which gloo does not notice."""


class Generations:
    """Connects one generation of workers at a time; see `Renewable`.

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
        store = PrefixStore(self._job, run_interruptibly(partial(reach_store, timeout_s), where))
        self.members = Members(store, int(os.environ[NUMBER]))
        if self.members.are_known:
            self._meet(self._next_store(where), where, MAKE_S)

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
                make_s = min(2 * make_s, MAKE_S)

    def _next_store(self, where: str) -> Store:
        return run_interruptibly(partial(self.members.advance, self._timeout_s), where)

    def _meet(self, store: Store, where: str, make_s: float) -> None:
        """Form the group of all members, which use this store; connecting may take `make_s` seconds."""
        rank, world_size = self.members.rank, len(self.members.current.members)
        if world_size > 1:
            make_s = min(make_s, self._timeout_s)
            store.set_timeout(timedelta(seconds=make_s))
            gpu = gpu_of(self._device)
            run_interruptibly(
                partial(make_group, store, gpu, rank, world_size, self._timeout_s, make_s), where
            )
            store.set_timeout(timedelta(seconds=self._timeout_s))
            self._group = ProcessGroup(self._device, self._timeout_s)
            self._group.connect(self.members.loss)

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
