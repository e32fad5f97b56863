"""Finds whether code of the program runs in backward: a function of its own, a hook, a recomputed forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

from samestep.errors import package_of

__all__ = ["OwnCode"]

_OF_OTHERS = {"samestep", "torch", *sys.stdlib_module_names}


class OwnCode:
    """Whether code of the program runs in backward.

    Attributes:
        is_expected: whether it has, or may have, in earlier steps. It is expected in the first one.
        is_found: whether it has run, or cannot be seen.
    """

    def __init__(self) -> None:
        self.is_expected, self.is_found = True, False
        self._hook = self._note  # the same object each time

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """Look for it in this block, with Python's hook for profilers."""
        if sys.getprofile() is not None:  # another profiler is running
            self.is_found = True
        if not self.is_found:
            sys.setprofile(self._hook)
        try:
            yield
        finally:
            if sys.getprofile() is self._hook:
                sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        self.is_found |= event == "call" and package_of(frame) not in _OF_OTHERS

    def look_at_stack(self, outermost: CodeType) -> None:
        """Look for it among the functions on this thread's stack, down to that of `outermost`."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not outermost and not self.is_found:
            self.is_found = package_of(frame) not in _OF_OTHERS
            frame = frame.f_back

    def end_step(self) -> None:
        """Expect in later steps what this one has shown."""
        self.is_expected = self.is_found
