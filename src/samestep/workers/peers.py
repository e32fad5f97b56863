"""Detects which other workers are gone, by a separate connection between every two workers.

The kernel closes a connection when a process ends, however it ends. gloo's own connections do not suffice: a
worker whose message was in flight when the other end died is not woken, see `rx_` and `tx_` in
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc. A worker sends three kinds of lines of
JSON: the first error that ended an exchange, so that all workers raise the same one; a message that it has
waited for too long; and, when the process ends, how its program ended. Workers read them while they wait.
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
        connections: connections to the others, by rank. If one is missing, this worker learns of that
            worker's end only from others.
        ask_launchers: returns which workers the launchers know to be lost, if there are such launchers; a
            host that is cut off closes no connection.

    Attributes:
        asked: the message that each worker last asked this one for.
        num_asked: how often this worker has asked each of the others.
    """

    def __init__(
        self,
        connections: dict[int, socket.socket],
        ask_launchers: Callable[[], str | None] | None = None,
    ) -> None:
        self._connections = connections
        self._ask_launchers = ask_launchers
        self._unread = dict.fromkeys(connections, b"")
        self.asked: dict[int, Message] = {}
        self.num_asked = Counter[int]()
        # Class and message of the first error that any worker, or this one, announced. Not the exception:
        # its traceback would keep frames alive, and with them a process group.
        self._error: tuple[str, str] | None = None
        self._loss_by_launchers: str | None = None
        self._gone: set[int] = set()
        self._ended: dict[int, str] = {}  # how a worker's program ended, if it could send that
        self._announced: set[int] = set()  # workers that have announced an error
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        close_in_child(self)
        _open.add(self)

    def look(self) -> None:
        """Read what has arrived, without waiting."""
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
        if self._ask_launchers is not None and self._loss_by_launchers is None:
            self._loss_by_launchers = self._ask_launchers()

    def _take(
        self, worker: int, *, error: Sequence[str] = (), waits_for: Sequence[Any] = (), ended: str = ""
    ) -> None:
        """Record one line from a worker."""
        if ended:
            self._ended[worker] = ended
        elif waits_for:
            self.asked[worker] = Message(*waits_for)
        else:
            kind, sentence = error
            self._error = self._error or (kind, sentence)
            self._announced.add(worker)

    def error(self, worker: int | None = None) -> Error | None:
        """Return the announced error, else a loss of `worker`, else one that the launchers know; or None."""
        if self._error is not None:
            kind, announced = self._error
            return _KINDS[kind](announced)
        if worker is not None and worker in self._gone:
            why = self._ended.get(worker, "its connections are closed")
            return LostWorkerError(f"worker {worker} is gone ({why})")
        return None if self._loss_by_launchers is None else LostWorkerError(self._loss_by_launchers)

    def cut(self) -> set[int]:
        """Return the workers whose connections ended without an announcement, for example by SIGKILL."""
        self.look()
        return self._gone - self._announced

    def announce(self, error: Error) -> None:
        """Send this worker's error to all others, so that they raise it, not the loss of this worker."""
        if self._error is None:
            self._error = (type(error).__name__, str(error))
            for worker in self._connections:
                self._send(worker, error=self._error)

    def ask_for(self, worker: int, message: Message) -> None:
        """Send a worker the message that this one is waiting for."""
        self.num_asked[worker] += 1
        if worker in self._connections:
            self._send(worker, waits_for=astuple(message))

    def say_end(self, how: str) -> None:
        """Send all others how this worker's program has ended, before the connections close."""
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
    # Python stores an uncaught exception under this name, but no exit status.
    error = getattr(sys, "last_value", None)
    what = "" if error is None else one_line(f"{type(error).__name__}: {error}")
    how = f"its program raised {what.removesuffix(':')}" if what else "its program has ended"
    for peers in _open:
        peers.say_end(how)
