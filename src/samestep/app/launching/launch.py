"""Running a job of W workers on this machine, and reporting once how it ended."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.app.launching.failures import Failure, root_cause
from samestep.app.launching.nodes import Nodes
from samestep.app.launching.supervisor import Supervisor
from samestep.app.launching.worker_process import WorkerProcess
from samestep.errors import StorageError, UsageError
from samestep.workers.environment import error_file, is_first, launched_by_samestep
from samestep.workers.interrupts import release_interrupts
from samestep.workers.process import GRACE_S, end_with_launcher
from samestep.workers.waiter import end_with_threads

if TYPE_CHECKING:
    from samestep.app.launching.hosts import Ending

__all__ = ["GRACE_S", "run_command", "run_worker", "temporary_folder"]


def run_command(command: Sequence[str], num_workers: int, *, threads: int, nodes: Nodes | None = None) -> int:
    """Run `command` in `num_workers` processes of one job, and wait for them.

    The workers write to this process's stdout and stderr. If a worker fails, the others are stopped, and the
    root cause is shown once. Signals to this process are forwarded to the workers, see `Supervisor`.

    Args:
        command: the command line; its main function should call `run_worker`.
        num_workers: number of worker processes on this host.
        threads: CPU threads of each worker.
        nodes: the options of a job of several hosts, each with its own launcher; None for a single host.

    Returns:
        The exit status: 0 for success, 128 + n if signal n to this process ended the job, otherwise that of
        the root cause: a worker's exit status, or 1 if the worker died without a record. If another host
        ended the job, the exit status of that host.

    Raises:
        ConfigError: this host has no loopback address, or other options than the job that it joins.
        LostWorkerError: a worker cannot be started; the other hosts did not come, or this host cannot
            continue without them.
        StorageError: there is no folder for temporary files.
        UsageError: this is not the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"workers are to be started by the thread {threading.current_thread().name!r}: expected the main "
            "thread, which receives the signals that stop them; call samestep.launch there, or use workers=1"
        )
    with temporary_folder("samestep-") as folder:
        supervisor = Supervisor(command, num_workers, threads=threads, folder=folder, nodes=nodes)
        supervisor.run()
        failed = [worker for worker in supervisor.workers if worker.status and not worker.is_left_behind]
        found = [(worker, _failure_of(worker, num_workers)) for worker in failed]
        if supervisor.received is None:
            if supervisor.ending is not None and all(failure.is_echo for _, failure in found):
                return _explain_ending(supervisor.ending)
            return _explain(found, num_workers) if found else 0
        if supervisor.workers and not found:
            return 0
        for text in dict.fromkeys(failure.text for _, failure in found if not failure.is_echo):
            sys.stderr.write(text)
        return 128 + supervisor.received


def run_worker(main: Callable[[], int]) -> int:
    """Run a worker's `main` and return its exit status, with every exception reported once.

    A `samestep.Error` is reported as one line, any other exception by its traceback, an interruption not at
    all. Under `run_command`, the launcher prints the report. torchrun prints how each worker ended, so under
    torchrun workers do not report lost workers, and only worker 0 reports a `samestep.Error`: usually all
    workers raise the same one.

    Args:
        main: does the work and returns an exit status; if that is not 0, `main` has printed the reason.
    """
    statuses: list[int] = []
    own = os.getpid()
    if launched_by_samestep():
        # Registered first, so called last. A process that `main` has forked has no status.
        atexit.register(lambda: end_with_threads(statuses[-1]) if statuses else None)
    try:
        end_with_launcher()
        release_interrupts()
        failure = Failure.of_status(main())
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if os.getpid() != own:  # a process that `main` has forked, not the worker
            raise
        failure = Failure.of(error)
    statuses.append(_report(failure))
    return statuses[-1]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder with the name prefix, and delete it at the end of the block.

    Raises:
        StorageError: on entering, the folder cannot be created.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise StorageError(f"the folder for temporary files: {error}; set TMPDIR to another one") from error
    with folder as name:
        yield Path(name)


def _report(failure: Failure) -> int:
    path = error_file()
    is_repeated = launched_by_samestep() or failure.is_echo or (failure.is_error and not is_first())
    if path is not None and failure.exit_status != 0:
        try:
            failure.write(path)
        except OSError:  # the disk is full, or the launcher is gone and has deleted the folder
            is_repeated = failure.is_echo
    if path is None or not is_repeated:
        sys.stderr.write(failure.text)
    return failure.exit_status


def _explain(found: Sequence[tuple[WorkerProcess, Failure]], num_workers: int) -> int:
    """Write the root cause to stderr and return the job's exit status."""
    described = [(worker.local_rank, failure) for worker, failure in found]
    rank, cause = root_cause(described)
    sys.stderr.write(cause.text)
    if not cause.is_recorded:  # add the error of a worker that lost it, which names the step
        sys.stderr.write(next((failure.text for _, failure in described if failure.is_error), ""))
    is_silent = cause.is_recorded and not (cause.text or cause.is_echo)
    if is_silent and any(failure.exit_status != cause.exit_status for _, failure in described):
        how = f"exited with status {cause.exit_status}"
        sys.stderr.write(f"samestep: worker {rank} of {num_workers} {how}; the job was stopped\n")
    if cause.was_interrupted:
        sys.stderr.write(
            f"samestep: worker {rank} of {num_workers} was interrupted by SIGINT; the job was stopped\n"
        )
    if cause.is_recorded and cause.text and not cause.is_error:
        sys.stderr.write(f"samestep: worker {rank} of {num_workers} failed; the job was stopped\n")
    return cause.exit_status


def _explain_ending(ending: Ending) -> int:
    sys.stderr.write(f"samestep: the host {ending.name} {ending.how}; the job was stopped\n")
    return ending.status


def _failure_of(worker: WorkerProcess, num_workers: int) -> Failure:
    """Return a worker's record, or describe a worker that died without one."""
    left = Failure.read(worker.error_file)
    if left is not None:
        return left
    status = worker.process.returncode
    how = f"was killed by {_name_of(-status)}" if status < 0 else f"exited with status {status}"
    text = (
        f"samestep: worker {worker.local_rank} of {num_workers} (pid {worker.process.pid}) {how}; "
        "the job was stopped\n"
    )
    return Failure(text, 1, is_echo=status == -(worker.last_signal or 0), is_recorded=False)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
