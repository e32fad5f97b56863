"""Reads from a torch DataLoader's processes, with one error class if they are killed or do not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pickle import PicklingError
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.errors import ConfigError, Error, LoaderError, one_line
from samestep.workers.process import end_with_parent
from samestep.workers.waiter import Patience

__all__ = ["default_start_method", "read_through", "start_loader_process", "timeout_option"]

_SLICE_S = 0.2
_EXIT_WAIT_S = 1.0
_CAUGHT = "Caught "
"""Start of the message of an error that DataLoader re-raises from a loader process."""


def default_start_method() -> str | None:
    """Return how loader processes start: "fork" on Linux, unless the program has set another method.

    From Python 3.14 on, multiprocessing's own default there is a fork server. It belongs to its worker's
    process group, so a signal to the group ends it, and the loader processes with it.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    is_chosen = chosen not in (None, multiprocessing.get_all_start_methods()[0])
    return chosen if is_chosen or sys.platform != "linux" else "fork"


def start_loader_process(_: int) -> None:
    """Set up a loader process, so that it ends with its worker, and silently.

    It leaves the process group: launchers and terminals signal the whole group, and a loader process that
    ends before its worker would make the worker fail in its last step.
    """
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
    sys.excepthook = partial(_say_unless_orphaned, sys.excepthook)


def _say_unless_orphaned(
    say: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an uncaught error in a loader process, unless its cause is that the worker has died.

    A worker's connections break a moment before the system signals its death to its children.
    """
    worker = multiprocessing.parent_process()
    if worker is not None and isinstance(error, ConnectionError | EOFError):
        worker.join(_EXIT_WAIT_S)  # if the worker died, this process is killed meanwhile
        if not worker.is_alive():
            return
    say(kind, error, trace)


def timeout_option(num_workers: int, persistent_workers: bool, timeout_s: float) -> float:
    """Return DataLoader's timeout: short if it can wait again, so that time while stopped does not count."""
    return 0 if num_workers == 0 else timeout_s if persistent_workers else min(_SLICE_S, timeout_s)


def read_through(loader: DataLoader[Any], rank: int, timeout_s: float) -> Generator[Any]:
    """Yield the items of a DataLoader with `timeout_option`, on worker `rank`.

    Raises:
        ConfigError: the dataset or a function cannot be sent to loader processes.
        LoaderError: no loader process returned anything within the timeout, or one was killed; the latter is
            raised at once in the main thread, at whatever line it is.
    """
    with torch.device("cpu"):  # DataLoader fills a tensor on the default device from our CPU generator
        batches = _named(partial(_started, loader), loader, rank, timeout_s)
    _name_killed(rank)
    while True:
        try:
            yield _named(partial(next, batches), loader, rank, timeout_s)
        except StopIteration:
            return


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader processes; if they are no forks, they import the script, and are sent pickles."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # torch's, beside the error
            return iter(loader)
    except (PicklingError, TypeError, AttributeError) as error:
        if "pickle" not in str(error):
            raise
        why = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(
            f"num_workers = {loader.num_workers}: the dataset, or a function of it, cannot be sent to loader "
            f"processes ({why}): define it at the top level of a module, or, on Linux, pass "
            "multiprocessing_context='fork'"
        ) from error
    except (ConnectionError, EOFError) as error:
        if (loader.multiprocessing_context or multiprocessing).get_start_method() == "fork":
            raise
        why = one_line(f"{type(error).__name__}: {error}")
        raise LoaderError(
            f"num_workers = {loader.num_workers}: loader processes could not be started ({why}): they import "
            "the script, so let it train under `if __name__ == '__main__':`; or, on Linux, pass "
            "multiprocessing_context='fork'"
        ) from error


def _named(call: Callable[[], Any], loader: DataLoader[Any], rank: int, timeout_s: float) -> Any:
    """Call a function that may wait for loader processes; call it again after a timeout of DataLoader's."""
    patience = Patience(timeout_s)
    while True:
        try:
            return call()
        except Error as error:
            raise _in_own_words(error) from None
        except RuntimeError as error:  # DataLoader has no error types of its own
            if isinstance(error.__cause__, LoaderError):
                raise error.__cause__ from None
            if str(error).startswith("DataLoader worker (pid"):
                raise _lost(error, rank) from error
            if not str(error).startswith("DataLoader timed out"):
                raise
        except (ConnectionError, EOFError) as error:
            if str(error).startswith(_CAUGHT):  # the dataset's error, from a live loader process
                raise
            # A loader process has just ended: SIGCHLD's handler raises a better error.
            time.sleep(_EXIT_WAIT_S)
            what = one_line(f"{type(error).__name__}: {error}")
            raise LoaderError(f"a loader process of worker {rank} is gone: {what}") from error
        if loader.timeout >= timeout_s or patience.is_over():
            _wake_stopped()
            raise LoaderError(
                f"worker {rank}: its loader processes have delivered nothing for {timeout_s:g} s: one of "
                "them is stopped or waits for a file; if reading takes that long, raise the timeout"
            )


def _in_own_words(error: Error) -> Error:
    """Return an error of a loader process, without the traceback that DataLoader puts into its message."""
    if not str(error).startswith(_CAUGHT):
        return error
    kind = type(error)
    return kind(str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].strip())


def _wake_stopped() -> None:
    """Resume stopped processes, so that they can act on the signal to end."""
    for process in multiprocessing.active_children():
        if process.pid is not None:
            os.kill(process.pid, signal.SIGCONT)


def _lost(error: RuntimeError, rank: int) -> LoaderError:
    hint = " (out of memory?)" if "signal: Killed" in str(error) else ""
    return LoaderError(f"a loader process of worker {rank} is gone: {one_line(str(error))}{hint}")


def _name_killed(rank: int) -> None:
    """Wrap torch's SIGCHLD handler to raise a `LoaderError`, which workers announce to each other."""
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
