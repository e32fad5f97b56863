"""Counts the messages between this worker and each other one, to detect workers that make different calls.

gloo matches messages by tag. The tags here are made of a message's number, size and name, so that gloo never
matches two different messages; it would abort the process, or accept the wrong one. A worker that waits for a
message in vain names it to the sender (`Peers.ask_for`), which then sees that it sent something else instead.
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
        number: its number among the messages from the one worker to the other.
        num_bytes: the size of all its tensors.
        what: its name on the worker that sends it, or that asks for it.
    """

    number: int
    num_bytes: int
    what: str

    @property
    def tag(self) -> int:
        """The tag by which gloo matches the message on both ends."""
        kind = kind_of_call(self.what).encode()
        # 31 bits, because a tag must be a non-negative int32.
        return zlib.crc32(struct.pack("<QQ", self.number, self.num_bytes) + kind) >> 1


class Ledger:
    """All messages of this worker so far."""

    def __init__(self) -> None:
        self._num_sent = Counter[int]()
        self._num_expected = Counter[int]()
        self._sent: dict[int, deque[Message]] = defaultdict(lambda: deque(maxlen=_MOST_KEPT))

    def send(self, worker: int, num_bytes: int, what: str) -> Message:
        """Record and return a message to a worker."""
        message = Message(self._num_sent[worker], num_bytes, what)
        self._num_sent[worker] += 1
        self._sent[worker].append(message)
        return message

    def expect(self, worker: int, num_bytes: int, what: str) -> Message:
        """Record and return a message from a worker."""
        message = Message(self._num_expected[worker], num_bytes, what)
        self._num_expected[worker] += 1
        return message

    def unmet(self, asked: Mapping[int, Message]) -> dict[int, tuple[Message, Message]]:
        """Return, for workers that ask for a message they were not sent, that message and the one sent."""
        return {
            worker: (message, sent)
            for worker, message in asked.items()
            for sent in self._sent[worker]
            if sent.number == message.number and sent.tag != message.tag
        }
