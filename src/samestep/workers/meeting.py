"""How the connections between every two workers come about that `Peers` looks at."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from samestep.workers.collectives import gather_objects
from samestep.workers.peers import Peers
from samestep.workers.process import open_listener
from samestep.workers.transport import Transport

__all__ = ["meet"]

_WHAT = "start"
_CONNECT_S = 2.0
_REPLY_S = 10.0
_TOKEN_BYTES = 16
_REPLY = b"\n"


def meet(transport: Transport) -> Peers:
    """Connect every two workers; all must call this. There is a warning where two cannot be connected."""
    with open_listener() as listener:
        cards = gather_objects(transport, _Card(listener.getsockname()[1]), _WHAT)
        called = {worker: _call(cards[worker], transport.rank) for worker in range(transport.rank)}
        callers = gather_objects(transport, {worker for worker, found in called.items() if found}, _WHAT)
        expected = {worker for worker, them in enumerate(callers) if transport.rank in them}
        connections = _accept(listener, expected, cards[transport.rank].token)
    for worker, connection in called.items():
        if connection is not None and _has_answered(connection):
            connections[worker] = connection
        else:
            warnings.warn(
                f"worker {transport.rank} found no way to {cards[worker].host}, where worker {worker} is: "
                "that the one is gone, the other may see only after the timeout",
                stacklevel=2,
            )
    return Peers(connections)


@dataclass(frozen=True)
class _Card:
    """Where a worker listens, and what to say there."""

    port: int
    host: str = field(default_factory=socket.gethostname)
    addresses: tuple[str, ...] = field(default_factory=lambda: tuple(_own_addresses()))
    token: bytes = field(default_factory=lambda: secrets.token_bytes(_TOKEN_BYTES))


def _own_addresses() -> Iterator[str]:
    """Yield the addresses from which this host reaches the workers' store: there, others may reach it."""
    with suppress(OSError):
        store = os.environ.get("MASTER_ADDR", "")
        for family, kind, _, _, address in socket.getaddrinfo(store, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # which sends nothing
                yield probe.getsockname()[0]


def _call(card: _Card, rank: int) -> socket.socket | None:
    """Connect to a worker; return None where none of its addresses leads to it."""
    here = ["localhost"] if card.host == socket.gethostname() else []
    for host in (*here, *card.addresses, card.host):
        with suppress(OSError):
            connection = socket.create_connection((host, card.port), timeout=_CONNECT_S)
            connection.sendall(card.token + rank.to_bytes(4))
            return connection
    return None


def _accept(listener: socket.socket, expected: set[int], token: bytes) -> dict[int, socket.socket]:
    """Accept the connections of the workers that have called; anybody else may call, too."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(_REPLY_S)
    with suppress(TimeoutError):
        while found.keys() != expected:
            connection, _ = listener.accept()
            caller = _caller(connection, token)
            if caller is None:
                connection.close()
            else:
                found[caller] = connection
    return found


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """Answer the worker that has called, and return its number; None if it is a stranger."""
    connection.settimeout(_CONNECT_S)
    with suppress(OSError):
        said = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
        if hmac.compare_digest(said[:_TOKEN_BYTES], token):
            connection.sendall(_REPLY)
            return int.from_bytes(said[_TOKEN_BYTES:])
    return None


def _has_answered(connection: socket.socket) -> bool:
    connection.settimeout(_REPLY_S)
    try:
        return connection.recv(1) == _REPLY
    except OSError:
        return False
