"""The hosts of a job, as the launcher of one of them sees them: which are lost, and why the job ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from samestep.app.launching.roster import PromptStore
from samestep.workers.waiter import Patience

__all__ = ["CUT_S", "LOST_S", "Ending", "Hosts", "is_running"]

LOST_S = 5.0
"""A launcher that is silent for this long is lost, and its host with it."""

CUT_S = 1.0
"""The same if a connection to its workers has also ended, as when a host's processes are killed."""

_PREFIX = "samestep/hosts"
_NUM_HOSTS, _NAME, _BEAT, _ENDED = "hosts", "name", "beat", "ended"
_LEFT = -(10**9)
_POLL_S = 0.1


@dataclass(frozen=True)
class Ending:
    """Why a host ended the job.

    Attributes:
        name: of the host.
        how: what happened there, such as "failed".
        status: what its launcher exits with.
    """

    name: str
    how: str
    status: int


class Hosts:
    """All hosts that the job has had. Each counts in the store as long as its launcher lives.

    Time is measured by this host's own clock, and without that in which this launcher did not run.

    Args:
        store: in which all meet.
        own: number of this host.

    Attributes:
        names: of all hosts, by their numbers.
        lost: numbers of those that were lost, or have left.
        ending: how another host has ended the job; None where none has.
    """

    def __init__(self, store: Store, own: int) -> None:
        self.own = own
        self.names: dict[int, str] = {}
        self.lost: set[int] = set()
        self.ending: Ending | None = None
        self._store = PromptStore(store, _PREFIX)
        self._counts: dict[int, int] = {}
        self._cut: dict[int, int] = {}  # how far a host had counted when it was last said to be cut
        self._silent: dict[int, tuple[Patience, Patience]] = {}  # since it counted; both are asked each time
        name = json.dumps([own, socket.gethostname()])
        self._store.ask(lambda store: store.set(f"{_NAME}/{store.add(_NUM_HOSTS, 1)}", name))
        self.look()

    def look(self, cut: Collection[int] = ()) -> None:
        """Count on, and see how far the others have counted.

        Args:
            cut: hosts to whose workers a connection has ended.

        Raises:
            LostWorkerError: the store does not answer.
        """
        self._store.ask(self._look)
        for host in self.names:
            is_soon, is_late = (patience.is_over() for patience in self._silent[host])
            count = self._counts[host]
            if host in cut:
                self._cut[host] = count
            is_cut = count <= self._cut.get(host, _LEFT) + 1  # it may have counted once more before
            if host != self.own and (count < 0 or is_late or (is_soon and is_cut)):
                self.lost.add(host)

    def _look(self, store: Store) -> None:
        self.names |= _hosts(store, len(self.names))
        for host in self.names:
            count = store.add(f"{_BEAT}/{host}", int(host == self.own))
            if count != self._counts.get(host):
                self._counts[host] = count
                self._silent[host] = Patience(CUT_S), Patience(LOST_S)
        if self.ending is None and store.check([_ENDED]):
            number, *ending = json.loads(store.get(_ENDED))
            self.ending = None if number == self.own else Ending(*ending)

    def end(self, how: str, status: int) -> None:
        """Let all launchers end the job, unless another one has."""
        text = json.dumps([self.own, socket.gethostname(), how, status])
        self._store.ask(lambda store: store.compare_set(_ENDED, "", text))

    def leave(self) -> None:
        """Say that this launcher ends."""
        self._store.ask(lambda store: store.add(f"{_BEAT}/{self.own}", _LEFT))

    def wait_for_others(self, is_interrupted: Callable[[], bool]) -> None:
        """Wait until all others have left, or are lost: whoever has the store must be the last."""
        self.look()
        while self.names.keys() - self.lost - {self.own} and not is_interrupted():
            time.sleep(_POLL_S)
            self.look()


def is_running(store: Store) -> bool:
    """Say whether any host of a job counts on, given the store in which its hosts meet."""
    prompt, patience = PromptStore(store, _PREFIX), Patience(LOST_S)
    before = counts = prompt.ask(_counts)
    while counts == before and not patience.is_over():
        time.sleep(_POLL_S)
        counts = prompt.ask(_counts)
    return any(counts[host] >= 0 and counts[host] != before.get(host) for host in counts)


def _counts(store: Store) -> dict[int, int]:
    return {host: store.add(f"{_BEAT}/{host}", 0) for host in _hosts(store)}


def _hosts(store: Store, num_known: int = 0) -> dict[int, str]:
    """Return the names of the hosts that came after those that are known, by their numbers."""
    found = {}
    for entry in range(num_known + 1, store.add(_NUM_HOSTS, 0) + 1):
        if not store.check([f"{_NAME}/{entry}"]):
            break  # it is about to be written
        host, name = json.loads(store.get(f"{_NAME}/{entry}"))
        found[host] = name
    return found
