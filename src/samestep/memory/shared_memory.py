"""Messages between workers of one host: through shared memory, and a socket that says where in it.

Tensors that lie in shared memory are not sent: the receiver copies them from there while it waits for them.
All other tensors go through the socket.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from samestep.errors import DisagreementError, calls_differ, kind_of_call, warn
from samestep.forks import close_in_child
from samestep.memory.channel import LONGEST, Channel, Kind, Packet
from samestep.memory.segments import Bytes, Segment, Segments, as_bytes, mapped

__all__ = ["Delivery", "SharedMemory"]

_WORTH_IT = 2**14
"""From this size on, to save a copy is worth the cost of shared memory."""

_MESSAGE = struct.Struct("<QQQI")  # number, position of this part, bytes of the message and of its name
_PART = struct.Struct("<qQQ")  # number of the segment, or _HERE; start in it; bytes
_HERE = -1  # the bytes follow in the packet
_LONGEST_NAME = 200
_ROOM = LONGEST - _MESSAGE.size - _LONGEST_NAME
_MOST_PARTS = 256
_MEMORY = struct.Struct("<QQ")  # a segment's number and bytes


class SharedMemory:
    """One worker's connections to the other workers of its host.

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
            with suppress(DisagreementError):  # of a packet that stays; the next wait raises and announces it
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
        """Start to send and to receive; see `Transport`."""
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
        """Send and receive whatever is possible without waiting."""
        for worker, channel in self._channels.items():
            channel.flush()
            while (packet := channel.packet()) is not None and self._take(worker, packet):
                channel.take()
            channel.acknowledge()

    def _take(self, worker: int, packet: Packet) -> bool:
        """Process a packet, perhaps for the second time; return False if no post expects it yet."""
        if packet.kind == Kind.TENSORS:
            return self._fill(worker, packet.content)
        number, size = _MEMORY.unpack(packet.content)
        if packet.kind == Kind.FORGET:
            self._theirs.pop((worker, number), None)
        elif (worker, number) not in self._theirs:
            self._theirs[worker, number] = self._map(worker, packet.descriptor, size)
            os.close(packet.descriptor)
        return True

    def _map(self, worker: int, descriptor: int, size: int) -> Bytes:
        try:
            if descriptor < 0:  # the kernel drops descriptors for which there is no number left
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return mapped(descriptor, size)
        except OSError as error:
            what = f"worker {self._rank} cannot map shared memory of worker {worker} ({error.strerror})"
            remedy = ": raise its limit, ulimit -n" if error.errno == errno.EMFILE else ""
            raise DisagreementError(f"{what}{remedy}") from error

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
                self._channels[worker].must_acknowledge = True  # which frees the segment
            incoming.fill(position, source[start : start + size])
            position += size
        if incoming.is_complete:
            self._expected.pop((worker, number), None)
        return True

    def wait_for(self, timeout_s: float) -> None:
        """Wait until something has probably arrived, or can be sent."""
        poll = select.poll()
        for channel in self._channels.values():
            events = 0 if channel.is_closed or channel.has_packet else select.POLLIN
            if channel.num_sent < channel.num_posted and not channel.is_deaf:
                events |= select.POLLOUT
            if events:
                poll.register(channel, events)
        poll.poll(1e3 * timeout_s)

    def close(self) -> None:
        """Close all connections, and free all memory that holds no tensor."""
        for channel in self._channels.values():
            channel.close()
        self._segments.close()
        self._theirs.clear()


def _named(what: str) -> bytes:
    """Return a message's name, cut to the longest that fits."""
    return what.encode()[:_LONGEST_NAME].decode(errors="ignore").encode()


_Part = tuple[list[bytes | memoryview], Segment | None, int]
"""Content to send for a piece of a tensor, the tensor's segment, and how many bytes the piece has."""


def _packets(parts: Iterator[_Part]) -> Iterator[tuple[list[bytes | memoryview], list[Segment], int]]:
    """Join parts into packets: content, segments that it refers to, and how many of the message's bytes."""
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
    """A message that a post expects, as far as it has arrived.

    Attributes:
        what: the message's name.
        kind: its number of bytes, and the part of its name that the sender's must have, too.
        other_name: the name of the message that arrived instead, if its kind differs.
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
        """Whether all bytes have arrived."""
        return self._filled == self._ends[-1]

    def fill(self, position: int, content: memoryview) -> None:
        """Copy a piece of one tensor to its position in the message."""
        index = bisect_right(self._ends, position)
        place = self._places[index]
        start = position - self._ends[index] + len(place)
        place.data[start : start + len(content)] = content
        self._filled = max(self._filled, position + len(content))


@dataclass
class Delivery:
    """Messages on their way to and from workers of this host.

    Attributes:
        worker: the one that this waits for.
        error: if that worker is gone, or has sent another message.
    """

    shared: SharedMemory
    rank: int
    channels: Mapping[int, Channel]
    received: Mapping[int, _Incoming]
    sent: Mapping[int, int]  # the number of each message's last packet
    worker: int | None = None
    error: Exception | None = None

    def is_done(self, timeout_s: float) -> bool:
        """Wait until all is sent and received or a worker is gone, for about `timeout_s` at most."""
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
