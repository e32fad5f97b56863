"""Standard output of commands: a lost terminal, broken pipe or full disk never ends a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

__all__ = ["is_stdout_lost", "lasting_output"]


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let no write to stdout or stderr raise inside the block; if stdout fails, say so once on stderr.

    Characters that the encoding cannot represent are written as escapes. A file that fails is replaced by
    /dev/null, so that Python's own last flush cannot change the exit status:
    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    if isinstance(sys.stdout, _Lasting):  # nested
        yield
        return
    _open_standard_files()
    before = sys.stdout, sys.stderr
    err = _Lasting("stderr", sys.stderr)
    out = _Lasting("stdout", sys.stdout, err)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        out.flush()  # finds out at once if stdout is closed
        yield
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def is_stdout_lost() -> bool:
    """Whether a write to stdout has failed."""
    return isinstance(sys.stdout, _Lasting) and sys.stdout.is_lost


class _Lasting:
    """Wraps a text file: after a failed write, drops all output and says so once in `complaints`."""

    def __init__(self, name: str, file: TextIO | None, complaints: _Lasting | None = None) -> None:
        self._name = name
        self._file = file
        self._complaints = complaints
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._try(lambda file: _write(file, text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda file: file.flush())

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):  # the terminal is gone, or the file is closed
            return self._file is not None and self._file.isatty()
        return False

    def _try(self, action: Callable[[TextIO], object]) -> None:
        if self.is_lost:
            return
        try:
            if self._file is None:
                raise ValueError("it is closed")
            action(self._file)
        except BlockingIOError:
            pass  # a full pipe that its reader made non-blocking
        except (OSError, ValueError) as error:
            self.is_lost = True
            _discard(self._file)
            if self._complaints is not None:
                reason = getattr(error, "strerror", None) or error
                self._complaints.write(
                    f"samestep: {self._name} cannot be written to ({reason}); going on without it\n"
                )
                self._complaints.flush()


def _write(file: TextIO, text: str) -> None:
    try:
        file.write(text)
    except UnicodeEncodeError as error:
        file.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def _discard(file: TextIO | None) -> None:
    """Flush the file's buffer to /dev/null."""
    if file is not None:
        with suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # StringIO has no descriptor
            os.dup2(null.fileno(), file.fileno())
            file.flush()


def _open_standard_files() -> None:
    """Open /dev/null for closed standard files: otherwise the next file opened would get their output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
