"""A connection between two workers of one host: packets arrive whole, in order, and once.

A signal handler may raise between any two lines here; `flush`, `packet` and `take` can then be called again.
That may send a packet twice, or examine a received one twice: packets are identified by number.
"""

from __future__ import annotations

import array
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import starmap

__all__ = ["LONGEST", "Channel", "Kind", "Packet"]

LONGEST = 2**15
"""The most bytes of content in a packet; a socket's buffer holds several packets."""

_HEADER = struct.Struct("<QQII")  # number, number of the last packet taken here, kind, bytes of content
_OUT_OF_ORDER = 0
_DESCRIPTOR = array.array("i", [0]).itemsize


class Kind(IntEnum):
    """What a packet contains."""

    TENSORS = 0
    MEMORY = 1
    FORGET = 2
    NOTHING = 3


@dataclass(frozen=True)
class Packet:
    """A received packet."""

    kind: Kind
    content: memoryview
    descriptor: int = -1


@dataclass(frozen=True)
class _Outgoing:
    number: int
    kind: Kind
    content: Sequence[bytes | memoryview] = ()
    descriptor: int = -1


_Came = tuple[int, list[tuple[int, int, bytes]], int, object]
"""What `recvmsg_into` returns: the number of bytes, ancillary data such as a descriptor, flags, address."""


class Channel:
    """One worker's end of a connection.

    Args:
        connection: a socket that preserves packet boundaries.

    Attributes:
        num_posted: how many packets were posted here.
        num_taken_there: how many of them the other worker has taken, as far as is known.
        must_acknowledge: whether the other worker waits to hear which packets were taken here.
        is_closed: whether the other worker has closed its end, so that nothing more arrives.
        is_deaf: whether nothing more can be sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.num_posted = self.num_taken_there = 0
        self.must_acknowledge = self.is_closed = self.is_deaf = False
        self._outgoing: deque[_Outgoing] = deque()
        self._num_taken = 0
        self._buffer = memoryview(bytearray(_HEADER.size + LONGEST))
        self._came: list[_Came] = []  # of the packet in the buffer

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._connection.fileno()

    @property
    def num_sent(self) -> int:
        """How many packets have been sent."""
        return self._outgoing[0].number - 1 if self._outgoing else self.num_posted

    def post(self, kind: Kind, content: Sequence[bytes | memoryview], descriptor: int = -1) -> int:
        """Send a packet, now or in a later `flush`, and return its number; `content` must stay until then."""
        self.num_posted += 1
        self._outgoing.append(_Outgoing(self.num_posted, kind, content, descriptor))
        self.flush()
        return self.num_posted

    def flush(self) -> None:
        """Send as many posted packets as the socket accepts."""
        while self._outgoing and self._send(self._outgoing[0]):
            self._outgoing.popleft()

    def acknowledge(self) -> None:
        """Acknowledge the packets taken here, if the other worker waits for that."""
        if self.must_acknowledge:
            self._send(_Outgoing(_OUT_OF_ORDER, Kind.NOTHING))

    def _send(self, packet: _Outgoing) -> bool:
        size = sum(map(len, packet.content))
        header = _HEADER.pack(packet.number, self._num_taken, packet.kind, size)
        beside = array.array("i", [packet.descriptor] if packet.descriptor >= 0 else [])
        try:
            self._connection.sendmsg(
                [header, *packet.content],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, beside)] if beside else [],
                socket.MSG_NOSIGNAL,
            )
        except BlockingIOError:
            return False
        except OSError:
            self.is_deaf = True
            return False
        self.must_acknowledge = False  # every header acknowledges
        return True

    @property
    def has_packet(self) -> bool:
        """Whether a packet has arrived and has not been taken."""
        number, _, _, _ = _HEADER.unpack_from(self._buffer)
        return bool(number == self._num_taken + 1)

    def packet(self) -> Packet | None:
        """Return the packet that has arrived, the same one until `take`; None if there is none."""
        while not self.has_packet:
            if not self._receive():
                return None
        _, _, kind, size = _HEADER.unpack_from(self._buffer)
        content = self._buffer[_HEADER.size : _HEADER.size + size]
        descriptors = [array.array("i", rights)[0] for _, _, rights in self._came[0][1]]
        return Packet(Kind(kind), content.toreadonly(), *descriptors)

    def take(self) -> None:
        """Allow the next packet, which will overwrite this one."""
        self._num_taken += 1

    def _receive(self) -> bool:
        """Receive the next packet, if any, even an acknowledgement; return whether to look again."""
        if self.is_closed:
            return False
        self._came.clear()
        call = ([self._buffer], socket.CMSG_SPACE(_DESCRIPTOR), socket.MSG_CMSG_CLOEXEC)
        try:
            # One call in C, during which no signal handler runs: a received descriptor cannot be lost.
            self._came.extend(starmap(self._connection.recvmsg_into, [call]))
        except BlockingIOError:
            return False
        except ConnectionResetError:  # is raised once, before the packets that arrived earlier
            return True
        self.is_closed = not self._came[0][0]
        _, num_taken_there, _, _ = _HEADER.unpack_from(self._buffer)
        self.num_taken_there = max(self.num_taken_there, num_taken_there)
        return not self.is_closed

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._connection.close()
