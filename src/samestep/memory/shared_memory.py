"""What workers of one host send each other: through memory that they share, and a socket that says where.

Tensors that lie in shared memory are not sent: the other worker copies them from there when it waits for
them. All others go through the socket.
"""

from __future__ import annotations

import os
import select
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from samestep.errors import calls_differ, kind_of_call, warn
from samestep.forks import close_in_child
from samestep.memory.channel import LONGEST, Channel, Kind, Packet
from samestep.memory.segments import Bytes, Segment, Segments, as_bytes, mapped

__all__ = ["Delivery", "SharedMemory"]

_WORTH_IT = 2**14
"""Bytes of a tensor from which on it is worth more to copy it once than to say where it is."""

_MESSAGE = struct.Struct("<QQQI")  # its number, where in it this is, and how many bytes it and its name have
_PART = struct.Struct("<qQQ")  # segment, or _HERE; where in it, and how many bytes
_HERE = -1
_LONGEST_NAME = 200
_ROOM = LONGEST - _MESSAGE.size - _LONGEST_NAME
_MOST_PARTS = 256
_MEMORY = struct.Struct("<QQ")  # a segment's number, and its bytes


class SharedMemory:
    """The workers of one host, as one of them reaches the others.

    Args:
        rank: of this worker.
        channels: to each of the others, by rank.
    """

    def __init__(self, rank: int, channels: Mapping[int, Channel]) -> None:
        self._rank, self._channels = rank, channels
        self._segments = Segments()
        self._theirs: dict[tuple[int, int], Bytes] = {}  # by worker and segment
        self._num_messages: dict[int, int] = defaultdict(int)  # to each worker
        self._num_expected: dict[int, int] = defaultdict(int)
        self._expected: dict[tuple[int, int], _Incoming] = {}  # by worker and number
        self._has_memory = bool(channels)
        close_in_child(self)

    def __contains__(self, worker: int) -> bool:
        """Whether a worker is on this host."""
        return worker in self._channels

    def empty(self, size: int, like: Tensor) -> Tensor:
        """Return memory to send from; see `Transport`."""
        num_bytes = size * like.dtype.itemsize
        if num_bytes >= _WORTH_IT and self._has_memory and like.device.type == "cpu":
            self.advance()
            try:
                return self._segments.empty(size, like.dtype)
            except OSError as error:
                self._has_memory = False
                warn(
                    f"worker {self._rank}: no shared memory for {num_bytes} bytes ({error.strerror}): "
                    "gradients go through sockets from now on, which is slower"
                )
        return like.new_empty(size)

    def post(
        self, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]], what: str
    ) -> Delivery:
        """Start to send and receive; see `Transport`."""
        received, sent = {}, {}
        for worker, tensors in incoming.items():
            if worker in self and any(tensor.numel() for tensor in tensors):
                received[worker] = self._expect(worker, tensors, what)
        for worker, tensors in outgoing.items():
            if worker in self and any(tensor.numel() for tensor in tensors):
                sent[worker] = self._send(worker, [tensor for tensor in tensors if tensor.numel()], what)
        for segment in self._segments.let_go():
            for channel in segment.sent:
                channel.post(Kind.FORGET, [_MEMORY.pack(segment.number, 0)])
        return Delivery(self, self._rank, self._channels, received, sent)

    def _expect(self, worker: int, tensors: Sequence[Tensor], what: str) -> _Incoming:
        found = _Incoming(tensors, what)
        self._expected[worker, self._num_expected[worker]] = found
        self._num_expected[worker] += 1
        return found

    def _send(self, worker: int, tensors: Sequence[Tensor], what: str) -> int:
        """Send one message, and return the number of its last packet."""
        channel, number, position = self._channels[worker], self._num_messages[worker], 0
        self._num_messages[worker] += 1
        name, size = _named(what), sum(tensor.nbytes for tensor in tensors)
        for content, segments, num_bytes in _packets(self._parts(channel, tensors)):
            for segment in segments:
                segment.sent[channel] = channel.num_posted + 1
            message = _MESSAGE.pack(number, position, size, len(name))
            channel.post(Kind.TENSORS, [message, name, *content])
            position += num_bytes
        return channel.num_posted

    def _parts(self, channel: Channel, tensors: Sequence[Tensor]) -> Iterator[_Part]:
        for tensor in tensors:
            content, segment = as_bytes(tensor), self._segments.holding(tensor)
            if segment is None:
                for start in range(0, len(content), LONGEST // 2):
                    piece = content[start : start + LONGEST // 2]
                    yield [_PART.pack(_HERE, 0, len(piece)), piece.data], None, len(piece)
                continue
            if channel not in segment.sent:
                described = _MEMORY.pack(segment.number, len(segment.content))
                segment.sent[channel] = channel.post(Kind.MEMORY, [described], segment.descriptor)
            where = content.ctypes.data - segment.content.ctypes.data
            yield [_PART.pack(segment.number, where, len(content))], segment, len(content)

    # ---- what comes ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Send what can go, and take what has come."""
        for worker, channel in self._channels.items():
            channel.flush()
            while (packet := channel.packet()) is not None and self._take(worker, packet):
                channel.take()
            channel.tell()

    def _take(self, worker: int, packet: Packet) -> bool:
        """Do what a packet says, perhaps once more; return False where nobody has asked for it yet."""
        if packet.kind == Kind.TENSORS:
            return self._fill(worker, packet.content)
        number, size = _MEMORY.unpack(packet.content)
        if packet.kind == Kind.FORGET:
            self._theirs.pop((worker, number), None)
        elif (worker, number) not in self._theirs:
            self._theirs[worker, number] = mapped(packet.descriptor, size)
            os.close(packet.descriptor)
        return True

    def _fill(self, worker: int, content: memoryview) -> bool:
        number, position, num_bytes, offset = _MESSAGE.unpack_from(content)
        incoming = self._expected.get((worker, number))
        if incoming is None:
            return bool(number < self._num_expected[worker])
        offset += _MESSAGE.size
        name = bytes(content[_MESSAGE.size : offset]).decode()
        if (num_bytes, kind_of_call(name)) != incoming.kind:
            incoming.other_name = name
            return True
        while offset < len(content):
            segment, start, size = _PART.unpack_from(content, offset)
            offset += _PART.size
            if segment == _HERE:
                source, start = content, offset
                offset += size
            else:
                source = self._theirs[worker, segment].data
                self._channels[worker].must_tell = True
            incoming.fill(position, source[start : start + size])
            position += size
        if incoming.is_complete:
            self._expected.pop((worker, number), None)
        return True

    def wait_for(self, timeout_s: float) -> None:
        """Wait until something may have come, or can go."""
        poll = select.poll()
        for channel in self._channels.values():
            events = 0 if channel.is_closed or channel.has_packet else select.POLLIN
            if channel.num_sent < channel.num_posted and not channel.is_deaf:
                events |= select.POLLOUT
            if events:
                poll.register(channel, events)
        poll.poll(1e3 * timeout_s)

    def close(self) -> None:
        """Close all connections, and let go of all memory that holds no tensor."""
        for channel in self._channels.values():
            channel.close()
        self._segments.close()
        self._theirs.clear()


def _named(what: str) -> bytes:
    """Return a message's name, as short as has to be."""
    return what.encode()[:_LONGEST_NAME].decode(errors="ignore").encode()


_Part = tuple[list[bytes | memoryview], Segment | None, int]
"""What is sent of a tensor, the segment that it lies in, and how many of the message's bytes it is."""


def _packets(parts: Iterator[_Part]) -> Iterator[tuple[list[bytes | memoryview], list[Segment], int]]:
    """Put parts together, as many as a packet takes."""
    content: list[bytes | memoryview] = []
    segments: list[Segment] = []
    num_bytes, room = 0, _ROOM
    for pieces, segment, size in parts:
        length = sum(map(len, pieces))
        if length > room or len(content) >= _MOST_PARTS:
            yield content, segments, num_bytes
            content, segments, num_bytes, room = [], [], 0, _ROOM
        content += pieces
        segments += [segment] if segment is not None else []
        num_bytes += size
        room -= length
    yield content, segments, num_bytes


class _Incoming:
    """A message that is asked for, and what has come of it.

    Attributes:
        what: names it.
        kind: the bytes of all of it, and what its name has in common with the sender's.
        other_name: the name of what has come in its place, if that is of another kind.
    """

    def __init__(self, tensors: Sequence[Tensor], what: str) -> None:
        self._places = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(map(len, self._places)))
        self._filled = 0
        self.what = what
        self.kind = (self._ends[-1], kind_of_call(_named(what).decode()))
        self.other_name: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all has come."""
        return self._filled == self._ends[-1]

    def fill(self, position: int, content: memoryview) -> None:
        """Copy what belongs at this place of the message: a part of one tensor."""
        index = bisect_right(self._ends, position)
        place = self._places[index]
        start = position - self._ends[index] + len(place)
        place.data[start : start + len(content)] = content
        self._filled = max(self._filled, position + len(content))


@dataclass
class Delivery:
    """Messages on their way to and from workers of this host.

    Attributes:
        worker: the one that is waited for now.
        error: that it is gone, or has sent something else.
    """

    shared: SharedMemory
    rank: int
    channels: Mapping[int, Channel]
    received: Mapping[int, _Incoming]
    sent: Mapping[int, int]  # the number of each message's last packet
    worker: int | None = None
    error: Exception | None = None

    def is_done(self, timeout_s: float) -> bool:
        """Wait until all is done, or a worker is gone, but not much longer than this."""
        self.shared.advance()
        if not self._look():
            self.shared.wait_for(timeout_s)
            self.shared.advance()
        return self._look()

    def _look(self) -> bool:
        for worker, incoming in self.received.items():
            if incoming.other_name is not None:
                self.error = calls_differ((self.rank, incoming.what), (worker, incoming.other_name))
                return True
            if not incoming.is_complete:
                return self._is_lost(worker, is_lost=self.channels[worker].is_closed)
        for worker, number in self.sent.items():
            if self.channels[worker].num_sent < number:
                return self._is_lost(worker, is_lost=self.channels[worker].is_deaf)
        return True

    def _is_lost(self, worker: int, *, is_lost: bool) -> bool:
        self.worker = worker
        if is_lost:
            self.error = ConnectionError("its connections are closed")
        return is_lost
