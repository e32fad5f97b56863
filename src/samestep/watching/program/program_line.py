"""The line, and the expression, of the program that runs an operator."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

from samestep.errors import is_ours, package_of
from samestep.watching.program.reach import is_of_watch

__all__ = ["Expression", "ProgramLine", "code_that_we_call", "frames_of_program", "has_resumed"]

_NUMBER = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)(?![\w.])")


class ProgramLine(NamedTuple):
    """A line of the program, from the top frame on this thread's stack that is not torch's or samestep's."""

    path: str
    number: int

    @classmethod
    def current(cls) -> ProgramLine:
        """Return the line that is running."""
        frame = sys._getframe(1)
        while frame.f_back and is_ours(frame):
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno)

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}, line {self.number}"

    def numbers(self) -> list[float] | None:
        """Return the decimal numbers that are written in the line; None if its source is not known."""
        text = linecache.getline(self.path, self.number)
        return [float(each) for each in _NUMBER.findall(text)] if text else None


def frames_of_program() -> Iterator[FrameType]:
    """Yield the frames on this thread's stack that are not torch's or samestep's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_ours(frame):
            yield frame
        frame = frame.f_back


def has_resumed(frame: FrameType) -> bool:
    """Say whether a frame on this thread's stack has resumed a generator, which is running."""
    called = sys._getframe(1)
    while called.f_back is not None and called.f_back is not frame:
        called = called.f_back
    return bool(called.f_code.co_flags & inspect.CO_GENERATOR)


def code_that_we_call() -> CodeType | None:
    """Return the code of the function of the program that samestep has called, such as a loss."""
    frame, found = sys._getframe(1), None
    while frame.f_back and is_of_watch(frame):
        frame = frame.f_back
    while frame.f_back and package_of(frame) != "samestep":
        found = found if is_ours(frame) else frame.f_code
        frame = frame.f_back
    return found if frame.f_back else None


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """An expression of the program, from the same frame.

    Attributes:
        code: what it is in.
        instruction: the index of the byte-code instruction that is running.
    """

    code: CodeType
    instruction: int

    @classmethod
    def current(cls) -> Expression | None:
        """Return the expression that runs an operator; None if samestep does, outside of this package."""
        frame = sys._getframe(1)
        while frame.f_back and is_of_watch(frame):
            frame = frame.f_back
        while frame.f_back and package_of(frame) == "torch":
            frame = frame.f_back
        return None if is_ours(frame) else cls(frame.f_code, frame.f_lasti // _INSTRUCTION_BYTES)

    def place(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return its first and last line, and first and last column; None if unknown."""
        return next(islice(self.code.co_positions(), self.instruction, None))

    def text(self) -> str:
        """Return its source; "" if unknown."""
        first, last, start, end = self.place()
        if first is None or last is None or start is None or end is None:
            return ""
        lines = [linecache.getline(self.code.co_filename, each).encode() for each in range(first, last + 1)]
        lines[-1] = lines[-1][:end]  # columns count bytes
        lines[0] = lines[0][start:]
        return b"".join(lines).decode()

    # A code object's own hash takes time.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Expression):
            return NotImplemented
        return self.code is other.code and self.instruction == other.instruction

    def __hash__(self) -> int:
        return hash((id(self.code), self.instruction))


_INSTRUCTION_BYTES = 2  # https://docs.python.org/3/library/dis.html
