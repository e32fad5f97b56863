"""The hosts of a job, as seen by the launcher of one of them: which are lost, and why the job ends."""

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
"""A host counts as lost if its launcher has been silent for this long."""

CUT_S = 1.0
"""The same if a connection to its workers has ended as well, as when all processes of a host are killed."""

_PREFIX = "samestep/hosts"
_NUM_HOSTS, _NAME, _BEAT, _ENDED = "hosts", "name", "beat", "ended"
_LEFT = -(10**9)
_POLL_S = 0.1


@dataclass(frozen=True)
class Ending:
    """Why a host ended the job.

    Attributes:
        name: the name of the host.
        how: what happened there, such as "failed".
        status: the exit status of its launcher.
    """

    name: str
    how: str
    status: int


class Hosts:
    """All hosts that the job has had. Each launcher increments a heartbeat counter in the store.

    Silence is measured by this host's own clock, without the time in which this launcher was stopped.

    Args:
        store: the store of the job.
        own: the number of this host.

    Attributes:
        names: the names of all hosts, by number.
        lost: the numbers of hosts that were lost or have left.
        ending: how another host has ended the job; None if none has.
    """

    def __init__(self, store: Store, own: int) -> None:
        self.own = own
        self.names: dict[int, str] = {}
        self.lost: set[int] = set()
        self.ending: Ending | None = None
        self._store = PromptStore(store, _PREFIX)
        self._counts: dict[int, int] = {}
        self._cut: dict[int, int] = {}  # a host's counter when a connection to it was last reported as cut
        self._silent: dict[int, tuple[Patience, Patience]] = {}  # of CUT_S and LOST_S, since the last count
        name = json.dumps([own, socket.gethostname()])
        self._store.ask(lambda store: store.set(f"{_NAME}/{store.add(_NUM_HOSTS, 1)}", name))
        self.look()

    def look(self, cut: Collection[int] = ()) -> None:
        """Increment this host's counter, read the others', and update `lost` and `ending`.

        Args:
            cut: numbers of hosts with a worker to which a connection has ended.

        Raises:
            LostWorkerError: the store does not answer.
        """
        self._store.ask(self._look)
        for host in self.names:
            # Both at each look: a `Patience` takes a long interval between calls for a stop of the process.
            is_soon, is_late = (patience.is_over() for patience in self._silent[host])
            count = self._counts[host]
            if host in cut:
                self._cut[host] = count
            is_cut = count <= self._cut.get(host, _LEFT) + 1  # it may have counted once more before the cut
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
        """Tell all launchers to end the job, unless another launcher has done so."""
        text = json.dumps([self.own, socket.gethostname(), how, status])
        self._store.ask(lambda store: store.compare_set(_ENDED, "", text))

    def leave(self) -> None:
        """Mark this host as having left."""
        self._store.ask(lambda store: store.add(f"{_BEAT}/{self.own}", _LEFT))

    def wait_for_others(self, is_interrupted: Callable[[], bool]) -> None:
        """Wait until all other hosts have left or are lost: the host with the store must leave last."""
        self.look()
        while self.names.keys() - self.lost - {self.own} and not is_interrupted():
            time.sleep(_POLL_S)
            self.look()


def is_running(store: Store) -> bool:
    """Return whether any host still increments its counter in a job's store."""
    prompt, patience = PromptStore(store, _PREFIX), Patience(LOST_S)
    before = counts = prompt.ask(_counts)
    while counts == before and not patience.is_over():
        time.sleep(_POLL_S)
        counts = prompt.ask(_counts)
    return any(counts[host] >= 0 and counts[host] != before.get(host) for host in counts)


def _counts(store: Store) -> dict[int, int]:
    return {host: store.add(f"{_BEAT}/{host}", 0) for host in _hosts(store)}


def _hosts(store: Store, num_known: int = 0) -> dict[int, str]:
    """Return the names of the hosts after the first `num_known` ones, by number."""
    found = {}
    for entry in range(num_known + 1, store.add(_NUM_HOSTS, 0) + 1):
        if not store.check([f"{_NAME}/{entry}"]):
            break  # the counter was incremented, and the name is about to be written
        host, name = json.loads(store.get(f"{_NAME}/{entry}"))
        found[host] = name
    return found
