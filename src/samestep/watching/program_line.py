"""The line of the program that runs an operator."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from samestep.errors import is_ours

__all__ = ["ProgramLine"]

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

    @classmethod
    def all_running(cls) -> Iterator[ProgramLine]:
        """Yield the lines that are running on this thread's stack and are not torch's or samestep's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_ours(frame):
                yield cls(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back

    def __str__(self) -> str:
        return f"{os.path.basename(self.path)}, line {self.number}"

    def numbers(self) -> list[float] | None:
        """Return the decimal numbers that are written in the line; None if its source is not known."""
        text = linecache.getline(self.path, self.number)
        return [float(each) for each in _NUMBER.findall(text)] if text else None
