"""Lists of the job's workers in the launchers' store: one list for each generation.

The launchers write the lists (`samestep.app.launching.roster`), because they see at once which process has
died. When a worker is lost or joins, all workers leave their process group and form a new one from the next
list. A process keeps its number; its rank is its position in the list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.environment import PER_HOST
from samestep.workers.waiter import Patience

__all__ = ["PREFIX", "Generation", "Key", "Members", "host_of"]

PREFIX = "samestep/members"
_POLL_S = 0.002
_LOOK_S = 0.25
_DUE_S = 1.0
"""How often training workers look for newcomers; each look waits for an answer of the launcher."""


def host_of(number: int) -> int:
    """Return the host of the worker with this number."""
    return number // PER_HOST


class Key(StrEnum):
    """The first part of the store's keys; the numbers of a generation and of a worker, or host, follow."""

    LIST = "list"  # the newest generation's members
    FIRST = "first"  # the first generation's members: all others are newcomers
    HERE = "here"  # a member has joined a generation
    READY = "ready"  # a newcomer has built all that it can on its own
    AWAY = "away"  # a newcomer cannot start from the others' state
    GOES_ON = "goes on"  # a worker can continue after the loss of another
    SILENT = "silent"  # a member has not answered within the timeout
    WAITED = "waited"  # a member reports that another is silent
    CUT = "cut"  # connections to a host broke without an announcement: the host may be lost
    AGAIN = "again"  # a generation could not connect
    DONE = "done"  # this worker has finished all work that others could take over
    OVER = "over"  # some worker has finished that work
    STREAMS = "streams"  # worker 0's global generators at the start of the job, for newcomers


@dataclass(frozen=True)
class Generation:
    """The workers of a job until the next loss or newcomer.

    Attributes:
        number: the generation's number, from 0.
        members: the numbers of its workers, in order of rank; empty if the job ends.
    """

    number: int
    members: tuple[int, ...]


class Members:
    """A worker's view of the lists.

    Attributes:
        own: this worker's number.
        current: this worker's generation; number −1 before it has joined one.
    """

    def __init__(self, store: Store, own: int) -> None:
        self.own = own
        self.current = Generation(-1, ())
        self._store = PrefixStore(PREFIX, store)
        self._seen = self.current
        self._looked_s = 0.0

    @property
    def rank(self) -> int:
        """This worker's rank in its generation."""
        return self.current.members.index(self.own)

    @property
    def are_known(self) -> bool:
        """Whether this worker is in the newest list; if not, it is a newcomer. Waits for the first list."""
        self._store.get(Key.FIRST)
        return self.own in self.newest().members

    def newest(self) -> Generation:
        """Return the newest list."""
        number, members = json.loads(self._store.get(Key.LIST))
        return Generation(number, tuple(members))

    def has_newer(self) -> bool:
        """Return whether there is a newer list; looked up once a second at most."""
        return self._look(_DUE_S).number > self.current.number

    def loss(self) -> str | None:
        """Describe the workers that are missing in the newest list; looked up four times a second at most."""
        newest = self._look(_LOOK_S).members
        left = [rank for rank, number in enumerate(self.current.members) if newest and number not in newest]
        is_or_are = "are" if len(left) > 1 else "is"
        return f"{_workers(left)} {is_or_are} gone (reported by the launchers)" if left else None

    def _look(self, every_s: float) -> Generation:
        if time.monotonic() - self._looked_s >= every_s:
            self._looked_s = time.monotonic()
            with suppress(DistError):  # the launcher is gone, so this worker ends soon
                self._seen = self.newest()
        return self._seen

    def say(self, key: Key, *about: int) -> None:
        """Report something to the launchers, about this worker or about the given numbers."""
        self._store.set("/".join(map(str, (key, *(about or (self.own,))))), "")

    def keep_streams(self, state: bytes) -> None:
        """Store the state of worker 0's generators for newcomers."""
        self._store.set(Key.STREAMS, state.hex())

    def streams(self) -> bytes | None:
        """Return the state that `keep_streams` has stored; None if it has not been called."""
        if not self._store.check([Key.STREAMS]):
            return None
        return bytes.fromhex(self._store.get(Key.STREAMS).decode())

    def finish(self) -> None:
        """Report to the launchers that all work that others could take over is done."""
        self.say(Key.DONE)
        self._store.set(Key.OVER, "")

    def accuse(self, rank: int) -> None:
        """Report to the launchers that a worker has been silent for longer than the timeout."""
        if 0 <= rank < len(self.current.members):
            self._accuse(self.current, rank)

    def _accuse(self, generation: Generation, rank: int) -> None:
        self.say(Key.WAITED, generation.number, self.own)
        self.say(Key.SILENT, generation.number, generation.members[rank])

    def report_cut(self, ranks: Iterable[int]) -> None:
        """Report to the launchers the hosts of workers whose connections ended unannounced."""
        for host in {host_of(self.current.members[rank]) for rank in ranks}:
            self.say(Key.CUT, self.current.number, host)

    def advance(self, timeout_s: float) -> Store:
        """Wait until all members of the next generation have joined it; return a store for that generation.

        Members that do not join within the timeout are reported as silent, once in each generation, but not
        by newcomers. If there is no new list within the timeout, because a connection broke between two live
        workers, this asks the launchers for one with the same members.

        Raises:
            LostWorkerError: the timeout has passed twice, or once for a newcomer; or the job ends.
        """
        patience, found = Patience(timeout_s), self.current
        may_accuse = trains = self.current.number >= 0
        while True:
            newest = self.newest()
            if not newest.members:
                raise LostWorkerError("the job ends")
            if newest.number > found.number and self.own in newest.members:
                found, patience, may_accuse = newest, Patience(timeout_s), trains
                self.say(Key.HERE, found.number, self.own)
            missing = [] if found is self.current else self._missing(found)
            if found is not self.current and not missing:
                self.current = self._seen = found  # an older list lacks workers that have joined since
                return PrefixStore(f"group/{found.number}", self._store)
            if patience.is_over():
                if not may_accuse:
                    who = _workers(missing) if missing else "the others"
                    raise LostWorkerError(f"{who} did not join within {timeout_s:g} s")
                for rank in missing:
                    self._accuse(found, rank)
                if not missing:
                    self.say(Key.AGAIN, self.current.number)
                patience, may_accuse = Patience(timeout_s), False
            time.sleep(_POLL_S)

    def _missing(self, generation: Generation) -> list[int]:
        """Return the ranks of members that have not joined yet."""
        here = [f"{Key.HERE}/{generation.number}/{member}" for member in generation.members]
        if self._store.check(here):
            return []
        return [rank for rank, key in enumerate(here) if not self._store.check([key])]


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
