"""Counts the messages between this worker and each other one, to detect workers that make different calls.

gloo matches messages by tag, which here is made of a message's number, size and name: messages that do not
belong together are never matched, where gloo would abort the process, or take one for the other. A worker
whose message does not arrive says which one it waits for (`Peers.ask_for`), and the other worker sees that it
has sent something else in its place.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import kind_of_call

__all__ = ["Ledger", "Message"]

_MOST_KEPT = 64


@dataclass(frozen=True)
class Message:
    """One message from one worker to another.

    Attributes:
        number: of those from that one to that other.
        num_bytes: of all of its tensors.
        what: names it, on the worker that sends it, or that asks for it.
    """

    number: int
    num_bytes: int
    what: str

    @property
    def tag(self) -> int:
        """By which gloo matches it, on both ends."""
        kind = kind_of_call(self.what).encode()
        # 31 bits, because a tag must be a non-negative int32.
        return zlib.crc32(struct.pack("<QQ", self.number, self.num_bytes) + kind) >> 1


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

    def unmet(self, asked: Mapping[int, Message]) -> dict[int, tuple[Message, Message]]:
        """Return, by worker, what it asks for and what it has been sent in its place."""
        return {
            worker: (message, sent)
            for worker, message in asked.items()
            for sent in self._sent[worker]
            if sent.number == message.number and sent.tag != message.tag
        }
