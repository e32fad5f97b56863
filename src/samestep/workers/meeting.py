"""Connects every two workers by a socket, and those that can share memory by a channel as well.

`Peers` watches the sockets; `SharedMemory` sends through the channels.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from samestep.errors import warn
from samestep.memory.channel import Channel
from samestep.memory.segments import try_out
from samestep.workers.collectives import gather_objects
from samestep.workers.listeners import open_listener
from samestep.workers.transport import Transport

__all__ = ["meet"]

_WHAT = "start"
_CONNECT_S = 2.0
_ACCEPT_S = 10.0
_TOKEN_BYTES = 16

_Address = tuple[str, int] | bytes
"""A host and a port, or the name of a socket of this host."""


def meet(transport: Transport, *, shares_memory: bool) -> tuple[dict[int, socket.socket], dict[int, Channel]]:
    """Connect every two workers, and those of one host by a channel if they can share memory.

    All workers must call this. There is a warning if two of them cannot connect, or cannot share memory.
    """
    rank = transport.rank
    with ExitStack() as stack:
        listener, local, own = _listen(stack, shares_memory=shares_memory)
        endpoints: list[_Endpoint] = gather_objects(transport, own, _WHAT)
        lower = dict(enumerate(endpoints[:rank]))
        near = {worker: each for worker, each in lower.items() if own.shares_with(each)}
        both = (
            _Connector(listener, _call(lower, _Endpoint.addresses, rank)),
            _Connector(local, _call(near, lambda each: [each.name], rank)),
        )
        reached = gather_objects(transport, [set(each.called) for each in both], _WHAT)
        for each, whom in zip(both, zip(*reached, strict=True), strict=True):
            each.accept(_workers_naming(rank, whom), own.token)
        accepted = gather_objects(transport, [set(each.accepted) for each in both], _WHAT)
    pairs = zip(both, zip(*accepted, strict=True), strict=True)
    connections, local_ones = (each.connections(_workers_naming(rank, whom)) for each, whom in pairs)
    channels = {worker: Channel(connection) for worker, connection in sorted(local_ones.items())}
    for worker in sorted(lower.keys() - connections.keys()):
        warn(
            f"worker {rank} could not connect to worker {worker} on {lower[worker].host}: if one of them is "
            "lost, the other may notice only after the timeout"
        )
    if rank == 0:
        _warn_if_memory_is_not_shared(endpoints, [them for _, them in reached])
    return connections, channels


@dataclass
class _Connector:
    """One kind of connection, between hosts or within one. Each worker connects to those of lower rank."""

    listener: socket.socket | None
    called: dict[int, socket.socket]
    accepted: dict[int, socket.socket] = field(default_factory=dict)

    def accept(self, expected: set[int], token: bytes) -> None:
        """Accept connections until these workers are connected; close those of other programs."""
        with suppress(TimeoutError):
            while self.listener is not None and self.accepted.keys() != expected:
                connection, _ = self.listener.accept()
                caller = _caller(connection, token)
                if caller is None:
                    connection.close()
                else:
                    self.accepted[caller] = connection

    def connections(self, accepted_by: set[int]) -> dict[int, socket.socket]:
        """Return all connections; close those that the worker did not accept: they led to a stranger."""
        for worker in self.called.keys() - accepted_by:
            self.called.pop(worker).close()
        return self.accepted | self.called


def _workers_naming(rank: int, named: Sequence[set[int]]) -> set[int]:
    return {worker for worker, them in enumerate(named) if rank in them}


@dataclass(frozen=True)
class _Endpoint:
    """The addresses at which a worker listens, and the token that identifies callers.

    Workers with the same `place` connect by `name`. If a worker cannot share memory, `place` is None, and
    `why` is the reason, if it should be reported.
    """

    port: int
    name: bytes = b""
    place: tuple[str, ...] | None = None
    why: str = ""
    host: str = field(default_factory=socket.gethostname)
    seen_as: tuple[str, ...] = field(default_factory=lambda: tuple(_own_addresses()))
    token: bytes = field(default_factory=lambda: secrets.token_bytes(_TOKEN_BYTES))

    def shares_with(self, other: _Endpoint) -> bool:
        return self.place is not None and self.place == other.place

    def addresses(self) -> list[tuple[str, int]]:
        here = ["localhost"] if self.host == socket.gethostname() else []
        return [(host, self.port) for host in (*here, *self.seen_as, self.host)]


def _own_addresses() -> Iterator[str]:
    """Yield the addresses from which this host reaches the workers' store: others may reach it there."""
    with suppress(OSError):
        store = os.environ.get("MASTER_ADDR", "")
        for family, kind, _, _, address in socket.getaddrinfo(store, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # for UDP this sends nothing
                yield probe.getsockname()[0]


def _listen(
    stack: ExitStack, *, shares_memory: bool
) -> tuple[socket.socket, socket.socket | None, _Endpoint]:
    """Listen for all workers, and, if this worker can share memory, for those of this host."""
    listener = stack.enter_context(open_listener())
    listener.settimeout(_ACCEPT_S)
    port = listener.getsockname()[1]
    if not shares_memory:
        return listener, None, _Endpoint(port)
    try:
        local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        local.bind(name := b"\0samestep-" + secrets.token_hex(_TOKEN_BYTES).encode())
        local.listen(socket.SOMAXCONN)
        local.settimeout(_ACCEPT_S)
        try_out(mmap.PAGESIZE)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return listener, local, _Endpoint(port, name, (boot, *map(_namespace, ("net", "pid", "user"))))
    except (AttributeError, OSError) as error:
        why = str(error) if hasattr(os, "memfd_create") else ""  # which only Linux has
        return listener, None, _Endpoint(port, why=why)


def _namespace(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}")


def _call(
    endpoints: Mapping[int, _Endpoint], addresses_of: Callable[[_Endpoint], Iterable[_Address]], rank: int
) -> dict[int, socket.socket]:
    """Connect to these workers, to each at the first address that works; leave out the others."""
    connections = {}
    for worker, endpoint in endpoints.items():
        for address in addresses_of(endpoint):
            with suppress(OSError):
                connection = _connected(address)
                connection.sendall(endpoint.token + rank.to_bytes(4))
                connections[worker] = connection
                break
    return connections


def _connected(address: _Address) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=_CONNECT_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ACCEPT_S)
    connection.connect(address)
    return connection


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank of the worker that has connected; None if it does not send the token."""
    connection.settimeout(_CONNECT_S)
    with suppress(OSError):
        said = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
        if hmac.compare_digest(said[:_TOKEN_BYTES], token):
            return int.from_bytes(said[_TOKEN_BYTES:])
    return None


def _warn_if_memory_is_not_shared(endpoints: Sequence[_Endpoint], reached: Sequence[set[int]]) -> None:
    """Warn about the first worker that does not share memory although another one is on its host."""
    for worker, endpoint in enumerate(endpoints):
        near = {w for w, other in enumerate(endpoints[:worker]) if endpoint.shares_with(other)}
        if endpoint.why or near - reached[worker]:
            why = endpoint.why or "they cannot connect to each other"
            warn(
                f"worker {worker} shares no memory with other workers of its host ({why}): gradients go "
                "through the network, which is slower"
            )
            return
