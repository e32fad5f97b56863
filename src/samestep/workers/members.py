"""Which processes the job consists of, in the launcher's store: a list for each generation of workers.

The launcher, which sees at once who has died, writes the lists (`Roster`); workers that have lost one, or are
to let one in, leave their process group and meet again as the next list says. A process has a number, which
it keeps; its rank is its place in the list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.waiter import Patience

__all__ = ["Generation", "Members", "Roster"]

_LIST, _HERE, _READY, _GOES_ON, _SILENT, _DONE = "list", "here", "ready", "goes on", "silent", "done"
_AGAIN, _WAITED = "again", "waited"
_POLL_S = 0.002
_LOOK_S = 0.25


@dataclass(frozen=True)
class Generation:
    """The workers of a job from one loss, or newcomer, to the next.

    Attributes:
        number: counted from 0.
        members: numbers of the processes, in the order of their ranks; none where the job ends.
    """

    number: int
    members: tuple[int, ...]


class Members:
    """A worker's view of the lists.

    Attributes:
        own: this worker's number.
        current: the generation that it belongs to.
    """

    def __init__(self, store: Store, own: int) -> None:
        self.own = own
        self.current = Generation(-1, ())
        self._store = PrefixStore("samestep/members", store)
        self._looked_s = 0.0

    @property
    def rank(self) -> int:
        """This worker's place in its generation."""
        return self.current.members.index(self.own)

    @property
    def are_known(self) -> bool:
        """Whether the newest list has this worker; if not, it is a newcomer."""
        return self.own in self.newest().members

    def newest(self) -> Generation:
        """Return the newest list."""
        number, members = json.loads(self._store.get(_LIST))
        return Generation(number, tuple(members))

    def has_newer(self) -> bool:
        """Say whether there is a newer list; looked up four times a second at most."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        try:
            return self.newest().number > self.current.number
        except DistError:  # the launcher is gone, and with it the store: this worker is about to be told so
            return False

    def can_go_on(self) -> None:
        """Let the launcher know that this worker goes on when another one is lost."""
        self._store.set(f"{_GOES_ON}/{self.own}", "")

    def finish(self) -> None:
        """Let the launcher know that what others may take over is done."""
        self._store.set(f"{_DONE}/{self.own}", "")

    def is_ready(self) -> None:
        """Let the launcher know that this worker, a newcomer, has all that it can have by itself."""
        self._store.set(f"{_READY}/{self.own}", "")

    def accuse(self, rank: int) -> None:
        """Let the launcher know that a worker has been silent for longer than the timeout."""
        if 0 <= rank < len(self.current.members):
            self._accuse(self.current, rank)

    def _accuse(self, generation: Generation, rank: int) -> None:
        self._store.set(f"{_WAITED}/{generation.number}/{self.own}", "")
        self._store.set(f"{_SILENT}/{generation.number}/{generation.members[rank]}", "")

    def ask_again(self) -> None:
        """Ask the launcher for another generation: this one could not connect."""
        self._store.set(f"{_AGAIN}/{self.current.number}", "")

    def advance(self, timeout_s: float) -> Store:
        """Wait for the next generation, and until all of it have come; return a store for them alone.

        Those who do not come within the timeout are accused once, unless it is the first generation.

        Raises:
            LostWorkerError: within the timeout there was none, or not all came; or the job ends.
        """
        patience, found, may_accuse = Patience(timeout_s), self.current, self.current.number >= 0
        while True:
            newest = self.newest()
            if not newest.members:
                raise LostWorkerError("the job ends")
            if newest.number > found.number and self.own in newest.members:
                found, patience = newest, Patience(timeout_s)
                self._store.set(f"{_HERE}/{found.number}/{self.own}", "")
            missing = [] if found is self.current else self._missing(found)
            if found is not self.current and not missing:
                self.current = found
                return PrefixStore(f"group/{found.number}", self._store)
            if patience.is_over():
                if not (missing and may_accuse):
                    who = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                    raise LostWorkerError(
                        f"{who if missing else 'the others'} did not join within {timeout_s:g} s"
                    )
                for rank in missing:
                    self._accuse(found, rank)
                patience, may_accuse = Patience(timeout_s), False
            time.sleep(_POLL_S)

    def _missing(self, generation: Generation) -> list[int]:
        """Return the ranks of those that have not come yet."""
        here = [f"{_HERE}/{generation.number}/{member}" for member in generation.members]
        if self._store.check(here):
            return []
        return [rank for rank, key in enumerate(here) if not self._store.check([key])]


class Roster:
    """The launcher's side: it writes the lists.

    Args:
        store: in which the workers find each other.
        members: numbers of the first generation.
    """

    def __init__(self, store: Store, members: Iterable[int]) -> None:
        self._store = PrefixStore("samestep/members", store)
        self._generation = -1
        self.members: tuple[int, ...] = ()
        self.become(members)

    def become(self, members: Iterable[int]) -> None:
        """Begin the next generation."""
        self._generation += 1
        self.members = tuple(members)
        self._store.set(_LIST, json.dumps([self._generation, self.members]))

    def close(self) -> None:
        """Let nobody wait for the next generation."""
        if self.members:
            self.become(())

    def go_on(self, numbers: Iterable[int]) -> bool:
        """Say whether all of these go on when another one is lost."""
        return self._all(_GOES_ON, numbers)

    def is_done(self, number: int) -> bool:
        """Say whether one has done all that others may take over."""
        return self._all(_DONE, [number])

    def is_asked_again(self) -> bool:
        """Say whether this generation could not connect."""
        return self._all(_AGAIN, [self._generation])

    def ready(self, numbers: Iterable[int]) -> list[int]:
        """Return those newcomers that have all that they can have by themselves."""
        return [number for number in numbers if self._all(_READY, [number])]

    def silent(self) -> list[int]:
        """Return the members that others have waited for in vain, but for those who waited themselves."""
        here = f"{self._generation}/"
        silent = [n for n in self.members if self._all(_SILENT, [f"{here}{n}"])]
        return [number for number in silent if not self._all(_WAITED, [f"{here}{number}"])]

    def _all(self, what: str, numbers: Iterable[int | str]) -> bool:
        check: Callable[[list[str]], bool] = self._store.check
        return check([f"{what}/{number}" for number in numbers])
