"""What Ctrl-C does to a process. Needed from its first line on, so this module imports very little."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["end_at_once_when_interrupted", "interrupts_held", "release_interrupts"]


def end_at_once_when_interrupted() -> None:
    """Let Ctrl-C end this process at once and silently, like SIGTERM, even while C code runs.

    Python's own handler runs only between bytecodes, and then prints a traceback. If SIGINT is ignored, it
    stays ignored. A SIGINT that was held back is delivered now.
    """
    # Process 1, as in a container, ignores signals that have the default action.
    if os.getpid() != 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    release_interrupts()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block SIGINT in processes that the block starts, until each calls `release_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interrupts() -> None:
    """Unblock SIGINT, once this process has set its handler; a pending one is delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
