"""What a process asks of the operating system, where it knows how: Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys

__all__ = ["end_with_parent", "join_own_group", "keep_freed_memory"]

_PR_SET_PDEATHSIG = 1  # of prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def end_with_parent(number: signal.Signals) -> None:
    """Let this process get a signal when its parent ends, however that comes. See prctl(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def join_own_group() -> None:
    """Leave the process group, and end with the parent.

    Launchers and terminals signal a whole group, and a helper that ends before its worker would make the
    worker fail in the step that it is to finish.
    """
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)


def keep_freed_memory() -> None:
    """Let glibc keep freed gradients for the next pass.

    By default it gives large blocks back to the system, and every pass pays for fresh zeroed pages:
    a quarter of a step for a perceptron of 10 million parameters. See mallopt(3).
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
