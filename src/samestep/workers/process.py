"""Settings of this process: when it ends with its launcher or parent, its memory and threads."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from samestep.arguments import whole
from samestep.errors import ConfigError
from samestep.workers.environment import LIFELINE, error_file

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "GRACE_S",
    "check_threads",
    "end_with_launcher",
    "end_with_parent",
    "imports_script",
    "keep_freed_memory",
]

DEFAULT_TIMEOUT_S = 600.0
"""Seconds to wait for another worker before it counts as lost."""

GRACE_S = 30
"""Seconds that workers have to finish their step and write a checkpoint before they are killed."""

_MAX_THREADS = 1024  # with too many, the system refuses a thread, and OpenMP ends the process
_PR_SET_PDEATHSIG = 1  # from prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def end_with_launcher() -> None:
    """Signal this process when its launcher dies, if samestep launched it; see `Supervisor`.

    The lifeline is a pipe that nobody writes to; it is closed when the launcher dies, however that happens.
    The signal is SIGTERM by default, which stops the job after a step. If other hosts can continue without
    this one, the launcher chooses a signal that ends the process at once. A second call does nothing.
    """
    value = os.environ.pop(LIFELINE, "")  # so that child processes do not take it for their own
    lifeline, _, number = value.partition(":")
    if lifeline.isdecimal():
        os.set_inheritable(int(lifeline), False)
        ending = int(lifeline), error_file(), signal.Signals(int(number or signal.SIGTERM))
        threading.Thread(target=_end_with, args=ending, daemon=True).start()


def _end_with(lifeline: int, left: Path | None, number: signal.Signals) -> None:
    os.read(lifeline, 1)
    if left is not None and left.parent.name.startswith("samestep-"):
        shutil.rmtree(left.parent, ignore_errors=True)  # the launcher's folder: the launcher is gone
    os.kill(os.getpid(), number)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Signal this process when its parent ends, for whatever reason. See prctl(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before prctl took effect
        os.kill(os.getpid(), number)


def imports_script() -> bool:
    """Whether this is a multiprocessing process that is importing its parent's script."""
    # The code after `-c`; from Python 3.14 on, a fork server's begins with `import sys`.
    begin = re.compile("(import sys; )?from multiprocessing[.](spawn|forkserver) import")
    is_child = any(map(begin.match, sys.orig_argv))
    return is_child and sys.modules.get("__mp_main__") is not sys.modules["__main__"]


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed gradients for the next pass.

    By default it returns large blocks to the system, and every pass pays for new zeroed pages: a quarter of a
    step for a perceptron of 10 million parameters. See mallopt(3).
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def check_threads(threads: int) -> None:
    """Raise for a number of CPU threads below 1, or above what the system may start."""
    if not 1 <= whole("threads", threads) <= _MAX_THREADS:
        raise ConfigError(f"threads = {threads}: expected 1 <= threads <= {_MAX_THREADS:,}")
