"""What torch's DataLoader reads in processes, with one error for those that are killed or do not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.errors import Error, LoaderError, one_line
from samestep.workers.process import end_with_parent
from samestep.workers.waiter import Patience

__all__ = ["read_through", "start_loader_process", "timeout_option"]

_SLICE_S = 0.2
_EXIT_WAIT_S = 1.0
_CAUGHT = "Caught "
"""How DataLoader begins the words of what a loader process has met."""


def start_loader_process(_: int) -> None:
    """Do what a loader process does first: see that it ends with its worker, and without a word.

    It leaves the process group. Launchers and terminals signal a whole group, and a process that ends before
    its worker would make the worker fail in the step that it is to finish.
    """
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
    sys.excepthook = partial(_say_unless_orphaned, sys.excepthook)


def _say_unless_orphaned(
    say: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say what a thread of a loader process met, unless it is that the worker has died.

    A worker's connections break a moment before the system tells its children that it is gone.
    """
    worker = multiprocessing.parent_process()
    if worker is not None and isinstance(error, ConnectionError | EOFError):
        worker.join(_EXIT_WAIT_S)  # in which this process is killed
        if not worker.is_alive():
            return
    say(kind, error, trace)


def timeout_option(num_workers: int, persistent_workers: bool, timeout_s: float) -> float:
    """Return DataLoader's timeout: a slice of ours where it can go on waiting, so that stops don't count."""
    return 0 if num_workers == 0 else timeout_s if persistent_workers else min(_SLICE_S, timeout_s)


def read_through(loader: DataLoader[Any], rank: int, timeout_s: float) -> Generator[Any]:
    """Yield what a DataLoader with `timeout_option` yields, on the worker `rank`.

    Raises:
        LoaderError: no process has handed in anything for the timeout; or one was killed, in which case it
            is raised at once in the main thread, whatever that does.
    """
    with torch.device("cpu"):  # whatever the default is: it draws a number from a generator of that device
        batches = _named(partial(iter, loader), loader, rank, timeout_s)
    _name_killed(rank)
    while True:
        try:
            yield _named(partial(next, batches), loader, rank, timeout_s)
        except StopIteration:
            return


def _named(call: Callable[[], Any], loader: DataLoader[Any], rank: int, timeout_s: float) -> Any:
    """Call what may wait for loader processes, again and again while it may go on waiting."""
    patience = Patience(timeout_s)
    while True:
        try:
            return call()
        except Error as error:
            raise _in_own_words(error) from None
        except RuntimeError as error:  # DataLoader has no types of its own
            if isinstance(error.__cause__, LoaderError):
                raise error.__cause__ from None
            if str(error).startswith("DataLoader worker (pid"):
                raise _lost(error, rank) from error
            if not str(error).startswith("DataLoader timed out"):
                raise
        except (ConnectionError, EOFError) as error:
            if str(error).startswith(_CAUGHT):  # in a loader process, which is there
                raise
            time.sleep(_EXIT_WAIT_S)  # a loader process has just ended: SIGCHLD says more
            what = one_line(f"{type(error).__name__}: {error}")
            raise LoaderError(f"a loader process of worker {rank} is gone: {what}") from error
        if loader.timeout >= timeout_s or patience.is_over():
            _wake_stopped()
            raise LoaderError(
                f"worker {rank}: its loader processes have handed in nothing for {timeout_s:g} s: one of "
                "them is stopped or waits for a file; if reading takes that long, raise the timeout"
            )


def _in_own_words(error: Error) -> Error:
    """Return an error of a loader process without the traceback that DataLoader puts before its words."""
    if not str(error).startswith(_CAUGHT):
        return error
    kind = type(error)
    return kind(str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].strip())


def _wake_stopped() -> None:
    """Let processes that are stopped go on, so that they end when they are told to."""
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signal.SIGCONT)


def _lost(error: RuntimeError, rank: int) -> LoaderError:
    hint = " (out of memory?)" if "signal: Killed" in str(error) else ""
    return LoaderError(f"a loader process of worker {rank} is gone: {one_line(str(error))}{hint}")


def _name_killed(rank: int) -> None:
    """Let torch's handler of SIGCHLD raise a `LoaderError`, of which workers tell each other."""
    raise_killed = signal.getsignal(signal.SIGCHLD)
    is_torchs = getattr(raise_killed, "__module__", "").startswith("torch.utils.data")
    if not callable(raise_killed) or not is_torchs or threading.current_thread() != threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            raise_killed(number, frame)
        except RuntimeError as error:
            raise _lost(error, rank) from error

    signal.signal(signal.SIGCHLD, handle)
