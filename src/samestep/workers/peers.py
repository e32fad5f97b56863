"""The other workers of a job, and which of them are gone: a connection of its own between every two.

The kernel closes it when a process ends, however it ends. gloo's connections alone do not do: it wakes nobody
whose message was on its way when the other end died, see `rx_` and `tx_` in
https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/pair.cc. Nothing is sent here but, once, the loss
of a worker, so that all name the same one, and which message one has waited for too long. Each is a line, and
nobody listens but workers that wait.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from samestep.forks import close_in_child
from samestep.workers.ledger import Message

__all__ = ["Peers"]


class Peers:
    """What this worker knows of the others.

    Args:
        connections: to them; of those without one it knows nothing by itself.

    Attributes:
        ask: asks others who was lost: the launchers, as a host that is cut off closes no connection.
        asked: the message that each worker has asked this one for last.
        num_asked: how often this one has asked each of them.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._connections = connections
        self._unread = dict.fromkeys(connections, b"")
        self.ask: Callable[[], str | None] | None = None
        self.asked: dict[int, Message] = {}
        self.num_asked = Counter[int]()
        self._heard: str | None = None  # from those
        self._gone: set[int] = set()
        self._talked: set[int] = set()
        self._told: str | None = None  # the first loss that any worker told of
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        close_in_child(self)

    def look(self) -> None:
        """Take in what has happened since."""
        for worker, connection in list(self._connections.items()):
            try:
                said = connection.recv(4096)
            except BlockingIOError:
                continue
            except OSError:  # reset, which is what an end without reading everything looks like
                said = b""
            if said:
                *lines, self._unread[worker] = (self._unread[worker] + said).split(b"\n")
                for line in lines:
                    self._hear(worker, json.loads(line))
            else:
                self._gone.add(worker)
                self._connections.pop(worker).close()
        if self.ask is not None and self._heard is None:
            self._heard = self.ask()

    def _hear(self, worker: int, said: str | list[Any]) -> None:
        if isinstance(said, str):
            self._told = self._told or said
            self._talked.add(worker)
        else:
            self.asked[worker] = Message(*said)

    def loss(self, worker: int | None = None) -> str | None:
        """Return the sentence that says who was lost: as a worker told it, or because `worker` is gone."""
        gone = f"worker {worker} is gone (its connections are closed)" if worker in self._gone else None
        return self._told or gone or self._heard

    def cut(self) -> set[int]:
        """Return those whose connections have ended without a word, as where they were killed."""
        self.look()
        return self._gone - self._talked

    def tell(self, sentence: str) -> None:
        """Let all others know whom this worker has lost, before they lose this one."""
        if self._told is None:
            self._told = sentence
            for worker in self._connections:
                self._say(worker, sentence)

    def ask_for(self, worker: int, message: Message) -> None:
        """Let a worker know which of its messages this one waits for."""
        self.num_asked[worker] += 1
        if worker in self._connections:
            self._say(worker, astuple(message))

    def _say(self, worker: int, what: str | tuple[Any, ...]) -> None:
        with suppress(OSError):
            self._connections[worker].send(json.dumps(what).encode() + b"\n")

    def close(self) -> None:
        """Close all connections."""
        while self._connections:
            self._connections.popitem()[1].close()
