"""The launchers' side of the lists of workers (see `samestep.workers.members`); each host has a launcher.

No launcher leads. Each removes its own host's lost workers from the list, and adds its newcomers; any of them
removes lost hosts. Concurrent changes are both made, because a list is replaced by compare-and-set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from samestep.errors import LostWorkerError
from samestep.workers.members import PREFIX, Key, host_of
from samestep.workers.waiter import Waiter

__all__ = ["PromptStore", "Roster"]

_ANSWER_S = 10.0

T = TypeVar("T")


class PromptStore:
    """A store that answers within seconds or raises: torch's store waits for ever if the network is cut.

    Args:
        store: torch's store.
        prefix: the prefix of all keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = PrefixStore(prefix, store)
        self._waiter = Waiter(_ANSWER_S)

    def ask(self, question: Callable[[Store], T]) -> T:
        """Return `question(store)`.

        Raises:
            LostWorkerError: the store does not answer, or is gone.
        """
        try:
            return self._waiter.call(lambda: question(self._store))
        except LostWorkerError:
            raise LostWorkerError(
                f"the job's store has not answered for {_ANSWER_S:g} s: this host was cut off, and its "
                "workers were ended; run the same command again once its network works"
            ) from None
        except DistError as error:
            raise LostWorkerError(
                "the job's store is gone, and with it the job: run the same command again on all hosts"
            ) from error


class Roster:
    """The list of a job's workers, as a launcher sees and changes it.

    Args:
        store: the store of the job.
        first: the first list; None for the launcher of a host that joins later.

    Attributes:
        generation: the number of the newest list that this launcher has read or written.
        members: the numbers of the workers in that list; empty if the job ends.
    """

    def __init__(self, store: Store, first: Iterable[int] | None = None) -> None:
        self._store = PromptStore(store, PREFIX)
        if first is not None:
            begin = json.dumps([0, list(first)])
            self._store.ask(lambda store: store.compare_set(Key.LIST, "", begin))
            self._store.ask(lambda store: store.set(Key.FIRST, begin))  # last: workers wait for this key
        _, members = json.loads(self._store.ask(lambda store: store.get(Key.FIRST)))
        self._first = frozenset(members)
        self.generation, self.members = 0, tuple[int, ...](members)
        self.look()

    def look(self) -> None:
        """Read the newest list."""
        self._change(lambda members: None)

    def without(self, numbers: Iterable[int]) -> bool:
        """Start a generation without these workers; do nothing if no member would be left.

        Returns:
            Whether none of these workers is a member now.
        """
        gone = set(numbers)

        def rest(members: Sequence[int]) -> tuple[int, ...]:
            return tuple(number for number in members if number not in gone)

        self._change(lambda members: rest(members) or None)
        return gone.isdisjoint(self.members)

    def let_in(self, numbers: Sequence[int], most: int | None = None) -> None:
        """Start a generation with these workers added, up to `most` in all, unless the job ends."""
        self._change(
            lambda members: (*members, *numbers)[: max(len(members), most or 2**31)] if members else None
        )

    def begin_again(self) -> None:
        """Start a generation with the same members, unless another launcher has started one."""
        seen = self.generation
        self._change(lambda members: members if self.generation == seen else None, is_same=True)

    def close(self) -> None:
        """Publish an empty list: the job ends, and no worker waits for another generation."""
        self._change(lambda members: ())

    def _change(
        self, change: Callable[[tuple[int, ...]], Sequence[int] | None], *, is_same: bool = False
    ) -> None:
        """Replace the list by `change(members)`, retrying if others change it meanwhile; None keeps it."""
        while True:
            old = self._store.ask(lambda store: store.get(Key.LIST))
            self._take_in(old)
            wanted = change(self.members)
            if wanted is None or not self.members or (tuple(wanted) == self.members and not is_same):
                break
            new = json.dumps([self.generation + 1, wanted])
            if self._replace(old.decode(), new):
                self._take_in(new)
                break

    def _replace(self, old: str, new: str) -> bool:
        found: bytes = self._store.ask(lambda store: store.compare_set(Key.LIST, old, new))
        return found.decode() == new

    def _take_in(self, text: bytes | str) -> None:
        self.generation, members = json.loads(text)
        self.members = tuple(members)

    # ---- reports of the workers ----------------------------------------------------------------------

    def newcomers(self, numbers: Iterable[int]) -> set[int]:
        """Return the workers among `numbers` that are not in the first list and do not train yet."""
        later = [number for number in numbers if number not in self._first]
        return {number for number in later if not self.go_on([number])}

    def go_on(self, numbers: Iterable[int]) -> bool:
        """Return whether all of these workers can continue if another one is lost."""
        return self._all(Key.GOES_ON, numbers)

    def is_done(self, number: int) -> bool:
        """Return whether a worker has finished all work that others would otherwise take over."""
        return self._all(Key.DONE, [number])

    def is_over(self) -> bool:
        """Return whether any worker has finished, see `is_done`."""
        return self._store.ask(lambda store: bool(store.check([Key.OVER])))

    def is_asked_again(self) -> bool:
        """Return whether workers of this generation have asked for another attempt to connect."""
        return self._all(Key.AGAIN, [self.generation])

    def ready(self, numbers: Iterable[int]) -> list[int]:
        """Return the newcomers among `numbers` that have built everything that they can on their own."""
        return [number for number in numbers if self._all(Key.READY, [number])]

    def sent_away(self, numbers: Iterable[int]) -> list[int]:
        """Return the newcomers among `numbers` that could not start at the others' current call."""
        return [number for number in numbers if self._all(Key.AWAY, [number])]

    def silent(self) -> list[int]:
        """Return the members that others have waited for until the timeout, except those that also waited."""
        here = f"{self.generation}/"
        silent = [n for n in self.members if self._all(Key.SILENT, [f"{here}{n}"])]
        return [number for number in silent if not self._all(Key.WAITED, [f"{here}{number}"])]

    def cut(self, own: int) -> set[int]:
        """Return the numbers of other hosts to which a connection has ended unannounced."""
        hosts = {host_of(number) for number in self.members} - {own}
        return {host for host in hosts if self._all(Key.CUT, [f"{self.generation}/{host}"])}

    def _all(self, what: Key, numbers: Iterable[int | str]) -> bool:
        keys = [f"{what}/{number}" for number in numbers]
        return self._store.ask(lambda store: bool(store.check(keys)))
