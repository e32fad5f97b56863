"""How workers of one host come to share memory: each two that see each other connect."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from samestep.workers.channel import Channel
from samestep.workers.collectives import gather_objects
from samestep.workers.segments import allocate
from samestep.workers.transport import Transport

__all__ = ["neighbours"]

_WHAT = "start"
_CONNECT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Card:
    """Where a worker is: those of one place reach each other by name, and have different numbers.

    `place` is none where it cannot share memory, for the reason given, if there is something to say.
    """

    place: tuple[str, ...] | None
    name: bytes
    process: int
    why: str = ""


def neighbours(transport: Transport) -> dict[int, Channel]:
    """Connect every two workers of one host that can share memory; all must call this."""
    with ExitStack() as stack:
        listener, card = _listen(stack)
        cards = gather_objects(transport, card, _WHAT)
        own = cards[transport.rank]
        here = [w for w, card in enumerate(cards) if own.place is not None and card.place == own.place]
        called = {worker: _call(cards[worker]) for worker in here if worker < transport.rank}
        connections = {worker: connection for worker, connection in called.items() if connection is not None}
        reached = gather_objects(transport, set(connections), _WHAT)
        callers = {cards[worker].process: worker for worker in here if transport.rank in reached[worker]}
        if listener is not None:
            connections |= _accept(listener, callers)
    if transport.rank == 0:
        _tell(cards, reached)
    return {worker: Channel(connections[worker]) for worker in sorted(connections)}


def _listen(stack: ExitStack) -> tuple[socket.socket | None, _Card]:
    """Listen, if this worker can share memory, and return where."""
    name = b"\0samestep-" + secrets.token_hex(_TOKEN_BYTES).encode()
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(name)
        listener.listen(socket.SOMAXCONN)
        listener.settimeout(_CONNECT_S)
        os.close(allocate(mmap.PAGESIZE))
        place = (
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            *map(_namespace, ("net", "pid", "user")),
        )
    except (AttributeError, OSError) as error:
        why = str(error) if hasattr(os, "memfd_create") else ""  # which no other system than Linux has
        return None, _Card(None, name, os.getpid(), why)
    return listener, _Card(place, name, os.getpid())


def _namespace(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}")


def _call(card: _Card) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(card.name)
        if _process_of(connection) == card.process:
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _accept(listener: socket.socket, callers: dict[int, int]) -> dict[int, socket.socket]:
    """Accept the connections of the workers that have called, by process; anybody else may have, too."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(callers):
        connection, _ = listener.accept()
        worker = callers.get(_process_of(connection))
        if worker is None:
            connection.close()
        else:
            found[worker] = connection
    return found


def _process_of(connection: socket.socket) -> int:
    """Return which process of this user's has the other end; −1 where it is somebody else's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process) if user == os.getuid() else -1


def _tell(cards: list[_Card], reached: list[set[int]]) -> None:
    """Say who could have shared memory and does not."""
    for worker, card in enumerate(cards):
        here = {w for w, c in enumerate(cards[:worker]) if c.place is not None and c.place == card.place}
        if card.why or here - reached[worker]:
            why = card.why or "they do not reach each other"
            warnings.warn(
                f"worker {worker} shares no memory with others of its host ({why}): gradients go through "
                "the network, which takes longer",
                stacklevel=2,
            )
            return
