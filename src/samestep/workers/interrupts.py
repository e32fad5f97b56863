"""What Ctrl-C does to a process, from its first line on; so this imports next to nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["end_at_once_when_interrupted", "interrupts_held", "release_interrupts"]


def end_at_once_when_interrupted() -> None:
    """Let Ctrl-C end this process silently, also while it waits or imports in C, as SIGTERM does.

    Python's own handler runs only between two bytecodes, and then prints where that was. A SIGINT that is
    ignored stays so; one that was held back comes now.
    """
    # In process 1, as in a container, the default action of a signal is to ignore it.
    if os.getpid() != 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    release_interrupts()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back from processes that are started, each until it calls `release_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_interrupts() -> None:
    """Let a SIGINT through that was held back until this process has chosen what it does."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
