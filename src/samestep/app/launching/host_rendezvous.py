"""The rendezvous of the launchers of several hosts: torch's own, in a store on one of the hosts."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from samestep.app.launching.hosts import is_running
from samestep.app.launching.nodes import Nodes
from samestep.app.launching.place import Place
from samestep.errors import ConfigError, LostWorkerError, one_line
from samestep.workers.environment import PER_HOST
from samestep.workers.store import join_store

__all__ = ["Rendezvous"]

_ENTRIES_S = 30.0
_POLL_S = 0.01
_LOOK_S = 1.0
_CLOSE_S = 3.0
_LAST_CALL_S = 3
"""How long a round with enough hosts waits for more of them; later hosts join without a restart."""

_LAST = "last job"

_Entry = dict[str, Any]


class Rendezvous:
    """Meets the launchers of the other hosts; a thread then meets hosts that come later.

    Each launcher leaves an entry in a round, for its host: workers, job, and values that must match.

    Args:
        nodes: the options of a job of several hosts.
        num_workers: number of workers on this host.
    """

    def __init__(self, nodes: Nodes, num_workers: int) -> None:
        self._nodes = nodes
        self._num_workers = num_workers
        # Without this, torch opens a second store, on whichever host comes first.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # this class reports errors
        self._store, self.has_store = join_store(nodes.host, nodes.port, nodes.timeout_s)
        # A second connection for torch's rendezvous, as its requests may block for long.
        self._meeting_store, _ = join_store(nodes.host, nodes.port, nodes.timeout_s)
        self._meeting_store.set_timeout(timedelta(seconds=_ENTRIES_S))
        self._handler = self._new_handler()
        self.place = self._meet()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._meet_others, daemon=True)
        self._thread.start()

    def open(self) -> Store:
        """Return the store."""
        return self._store

    def close(self) -> None:
        """Close the rendezvous for new hosts, because the job is over."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(2 * _CLOSE_S)

    def _close(self) -> None:
        self.leave()
        with suppress(DistError):
            self._handler.shutdown()

    def leave(self) -> None:
        """Stop the thread: if it returned from torch while Python shuts down, the process would abort."""
        self._has_ended.set()
        self._thread.join(_CLOSE_S)

    def _new_handler(self) -> RendezvousHandler:
        nodes = self._nodes
        backend = C10dRendezvousBackend(self._meeting_store, nodes.job_id)
        parameters = RendezvousParameters(
            "c10d",
            f"{nodes.host}:{nodes.port}",
            nodes.job_id,
            nodes.fewest,
            nodes.most,
            socket.gethostname(),
            join_timeout=max(1, round(nodes.timeout_s)),
            last_call_timeout=_LAST_CALL_S,
        )
        return create_handler(self._meeting_store, backend, parameters)

    def _meet(self) -> Place:
        nodes = self._nodes
        self._jobs = PrefixStore(f"samestep/rendezvous/{nodes.job_id}", self._meeting_store)
        own = self._jobs.add("hosts", 1) - 1
        self._entry: _Entry = {
            "host": own,
            "workers": self._num_workers,
            "job": None,
            "token": secrets.token_hex(4),
            "must_match": dict(nodes.must_match),
        }
        sys.stderr.write(
            f"samestep: {socket.gethostname()} waits at {nodes.host}:{nodes.port} for {nodes.fewest} to "
            f"{nodes.most} hosts of the job {nodes.job_id}\n"
        )
        try:
            return self._place(self._next())
        except (RendezvousClosedError, RendezvousGracefulExitError):
            why = "is over: to continue its run, give another --rdzv-id"
        except RendezvousTimeoutError:
            why = f"did not get {nodes.fewest} hosts within {nodes.timeout_s:g} s"
        except (RendezvousError, DistError) as error:
            why = f"cannot be joined: its store is gone ({one_line(str(error))})"
        raise LostWorkerError(f"the job {nodes.job_id} at {nodes.host}:{nodes.port} {why}")

    def _next(self) -> RendezvousInfo:
        """Wait for the next round of the rendezvous, and leave this host's entry in it."""
        info = self._handler.next_rendezvous()
        info.store.set(f"entry/{info.rank}", json.dumps(self._entry))
        return info

    def _place(self, info: RendezvousInfo) -> Place:
        entries = _entries(info)
        begun = next((entry for entry in entries if entry["job"] is not None), None)
        if begun is None:
            begun = self._running_job(info, entries[0])
        if begun is not None:
            self._check_same(begun)
        self._entry["job"] = begun["job"] if begun else entries[0]["token"]
        counts = [entry["workers"] for entry in entries]
        members = [entry["host"] * PER_HOST + rank for entry in entries for rank in range(entry["workers"])]
        members = members[: self._nodes.most_workers]  # further workers wait until a member is lost
        return Place(
            job=self._entry["job"],
            host=self._entry["host"],
            address=(self._nodes.host, self._nodes.port),
            first_rank=0 if begun else sum(counts[: info.rank]),
            world_size=self._num_workers if begun else len(members),
            members=None if begun else members,
        )

    def _running_job(self, info: RendezvousInfo, first: _Entry) -> _Entry | None:
        """Return the entry of a running job of which no host has come to this round; None if there is none.

        The job's hosts may have been silent for longer than torch waits for them. Rank 0 of the round looks
        the job up, and passes the result to the others.
        """
        if info.rank == 0:
            last = json.loads(self._jobs.get(_LAST)) if self._jobs.check([_LAST]) else None
            if last is not None and not is_running(PrefixStore(last["job"], self._store)):
                last = None
            if last is None:
                self._jobs.set(_LAST, json.dumps(first | {"job": first["token"]}))
            info.store.set(_LAST, json.dumps(last))
        found: _Entry | None = json.loads(info.store.get(_LAST))
        return found

    def _check_same(self, begun: _Entry) -> None:
        """Raise a `ConfigError` if this host was started with other values than the job that it joins."""
        for name, theirs in begun["must_match"].items():
            own = self._entry["must_match"].get(name)
            if own != theirs:
                raise ConfigError(
                    f"the job {self._nodes.job_id} has {name} = {one_line(str(theirs))}, this host has "
                    f"{one_line(str(own))}: start all hosts with the same command line"
                )

    def _meet_others(self) -> None:
        """Start another round whenever a host waits; runs in a daemon thread."""
        while not self._has_ended.wait(_LOOK_S):
            try:
                if self._handler.num_nodes_waiting() > 0:
                    self._next()
            except (RendezvousClosedError, RendezvousGracefulExitError):
                return
            except (RendezvousError, DistError):
                continue  # the waiting host is gone; or the store is, which the launcher notices by itself


def _entries(info: RendezvousInfo) -> list[_Entry]:
    """Return the entries of all hosts of a round; those so far, if one belongs to a job that has begun."""
    deadline_s = time.monotonic() + _ENTRIES_S
    while True:
        keys = [f"entry/{rank}" for rank in range(info.world_size)]
        there = [key for key in keys if info.store.check([key])]
        entries = [json.loads(info.store.get(key)) for key in there]
        if len(entries) == info.world_size or any(entry["job"] is not None for entry in entries):
            return entries
        if time.monotonic() > deadline_s:
            missing = f"{info.world_size - len(entries)} of {info.world_size} hosts"
            raise LostWorkerError(f"{missing} were lost before the job began; start all hosts again")
        time.sleep(_POLL_S)
