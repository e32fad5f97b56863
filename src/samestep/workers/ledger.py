"""The messages between this worker and each other one, by number, so that calls that differ are told.

gloo takes a message by its tag, which here is made of the message's number and size: what does not belong
together never meets, where gloo would end the process. So a worker whose message does not come says which one
it is (`Peers.ask_for`), and the other one sees that it has sent something else in its place.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Ledger", "Message"]

_MOST_KEPT = 64


@dataclass(frozen=True)
class Message:
    """One message from one worker to another.

    Attributes:
        number: of those from that one to that other.
        num_bytes: of all of its tensors.
        what: names it, as the worker does that sends it, or that asks for it.
    """

    number: int
    num_bytes: int
    what: str

    @property
    def tag(self) -> int:
        """What gloo takes it by, on both ends."""
        return zlib.crc32(struct.pack("<QQ", self.number, self.num_bytes)) >> 1  # a positive int32


class Ledger:
    """All messages so far."""

    def __init__(self) -> None:
        self._num_sent = Counter[int]()
        self._num_expected = Counter[int]()
        self._sent: dict[int, deque[Message]] = defaultdict(lambda: deque(maxlen=_MOST_KEPT))

    def send(self, worker: int, num_bytes: int, what: str) -> Message:
        """Note a message to a worker."""
        message = Message(self._num_sent[worker], num_bytes, what)
        self._num_sent[worker] += 1
        self._sent[worker].append(message)
        return message

    def expect(self, worker: int, num_bytes: int, what: str) -> Message:
        """Note a message from a worker."""
        message = Message(self._num_expected[worker], num_bytes, what)
        self._num_expected[worker] += 1
        return message

    def unmet(self, asked: Mapping[int, Message]) -> dict[int, Message]:
        """Return what workers ask for that have been sent another message in its place."""
        return {
            worker: message
            for worker, message in asked.items()
            for sent in self._sent[worker]
            if sent.number == message.number and sent.num_bytes != message.num_bytes
        }
