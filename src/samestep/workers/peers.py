"""The other workers of a job, and which of them are gone: a separate connection between every two.

The kernel closes it when a process ends, however it ends. gloo's own connections do not suffice: a worker
whose message was in flight when the other end died is not woken, see `rx_` and `tx_` in
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc. Three things are sent here, each as a
line of JSON: once, the error that ended the exchange, so that all workers raise the same one; which message a
worker has waited for too long; and at a process's end, how its program ended. Workers read them while they
wait.
"""

from __future__ import annotations

import atexit
import json
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from samestep.errors import DisagreementError, Error, LostWorkerError, one_line
from samestep.forks import close_in_child
from samestep.workers.ledger import Message

__all__ = ["Peers"]

_KINDS = {kind.__name__: kind for kind in (DisagreementError, LostWorkerError)}


class Peers:
    """What this worker knows about the others.

    Args:
        connections: to the others; without one, it learns of a worker's end from others only.

    Attributes:
        ask: asks the launchers who was lost, as a host that is cut off closes no connection.
        asked: the message that each worker asked this one for last.
        num_asked: how often this one has asked each of them.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections
        self._unread = dict.fromkeys(connections, b"")
        self.ask: Callable[[], str | None] | None = None
        self.asked: dict[int, Message] = {}
        self.num_asked = Counter[int]()
        # Kind and sentence of the first error that any worker announced, this one included. No exception: its
        # traceback would keep frames alive, and with them a process group.
        self._error: tuple[str, str] | None = None
        self._loss_by_launchers: str | None = None
        self._gone: set[int] = set()
        self._ended: dict[int, str] = {}  # how programs have ended, where a worker could say so
        self._announced: set[int] = set()  # workers that have announced an error
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        close_in_child(self)
        _open.add(self)

    def look(self) -> None:
        """Take in what has happened since."""
        for worker, connection in list(self._connections.items()):
            try:
                received = connection.recv(4096)
            except BlockingIOError:
                continue
            except OSError:  # reset: the peer closed its end without reading everything
                received = b""
            if received:
                *lines, self._unread[worker] = (self._unread[worker] + received).split(b"\n")
                for line in lines:
                    self._take(worker, **json.loads(line))
            else:
                self._gone.add(worker)
                self._connections.pop(worker).close()
        if self.ask is not None and self._loss_by_launchers is None:
            self._loss_by_launchers = self.ask()

    def _take(
        self, worker: int, *, error: Sequence[str] = (), waits_for: Sequence[Any] = (), ended: str = ""
    ) -> None:
        """Take in one line from a worker."""
        if ended:
            self._ended[worker] = ended
        elif waits_for:
            self.asked[worker] = Message(*waits_for)
        else:
            kind, sentence = error
            self._error = self._error or (kind, sentence)
            self._announced.add(worker)

    def error(self, worker: int | None = None) -> Error | None:
        """Return the error that a worker has announced; else a loss: of `worker`, or that launchers know."""
        if self._error is not None:
            kind, announced = self._error
            return _KINDS[kind](announced)
        if worker is not None and worker in self._gone:
            why = self._ended.get(worker, "its connections are closed")
            return LostWorkerError(f"worker {worker} is gone ({why})")
        return None if self._loss_by_launchers is None else LostWorkerError(self._loss_by_launchers)

    def cut(self) -> set[int]:
        """Return those whose connections have ended unannounced, as where they were killed."""
        self.look()
        return self._gone - self._announced

    def announce(self, error: Error) -> None:
        """Let all others raise this worker's error, too, before they lose this one."""
        if self._error is None:
            self._error = (type(error).__name__, str(error))
            for worker in self._connections:
                self._send(worker, error=self._error)

    def ask_for(self, worker: int, message: Message) -> None:
        """Let a worker know which of its messages this one waits for."""
        self.num_asked[worker] += 1
        if worker in self._connections:
            self._send(worker, waits_for=astuple(message))

    def say_end(self, how: str) -> None:
        """Let all others know how this worker's program has ended, before its connections close."""
        for worker in self._connections:
            self._send(worker, ended=how)

    def _send(self, worker: int, **line: Any) -> None:
        with suppress(OSError):
            self._connections[worker].send(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close all connections."""
        while self._connections:
            self._connections.popitem()[1].close()


_open: weakref.WeakSet[Peers] = weakref.WeakSet()


@atexit.register
def _say_end() -> None:
    # Python keeps an exception that nothing has caught under this name, and no exit status.
    error = getattr(sys, "last_value", None)
    what = "" if error is None else one_line(f"{type(error).__name__}: {error}")
    how = f"its program raised {what.removesuffix(':')}" if what else "its program has ended"
    for peers in _open:
        peers.say_end(how)
