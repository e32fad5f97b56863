"""Starting W workers on this machine through torch's elastic agent, and reporting how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from samestep.app.failures import Failure, root_cause
from samestep.app.interruption import ECHO_S, is_ignored
from samestep.workers.environment import error_file, launched_by_samestep, rank, worker_environment

__all__ = ["GRACE_S", "launch", "run_worker"]

GRACE_S = 30
"""Seconds that workers have to finish their step and write a checkpoint before they are killed."""

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(command: Sequence[str], num_workers: int, *, threads: int) -> int:
    """Run `command` in `num_workers` processes of one job, and wait for them.

    The workers' output passes straight through. When one fails, the others are stopped, and the error
    that came first is shown once. SIGINT and SIGTERM are passed on to the workers, which have `GRACE_S`
    seconds to finish; a second one, more than a second later, kills them.

    Args:
        command: the command line; its main function should go through `run_worker`.
        num_workers: processes of the job, W.
        threads: CPU threads of each worker.

    Returns:
        The exit status: 0, that of the `samestep.Error` that ended the job, 1 for any other failure, or
        128 + the number of the signal that ended it.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        try:
            return _run(command, num_workers, threads, folder)
        except SignalException as stop:
            for failure in _left_behind(Path(folder)):
                sys.stderr.write(failure.text)
            return 128 + stop.sigval


def run_worker(main: Callable[[], int]) -> int:
    """Run a worker's `main` and return its exit status, with every exception reported once.

    A `samestep.Error` becomes one line, anything else its traceback, an interruption nothing. Under
    `launch` the launcher shows it. torchrun reports at the end how every worker ended; so under it workers
    write to stderr only what is new: not that another one is gone, and an `Error`, which mostly all of
    them raise, only from worker 0.

    Args:
        main: does the work and returns an exit status; non-zero where it has printed why.
    """
    try:
        status = main()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return _report(Failure.of(error))
    return _report(Failure.of_status(status))


def _report(failure: Failure) -> int:
    path = error_file()
    if path is not None and failure.exit_status != 0:
        failure.write(path)
    is_repeated = launched_by_samestep() or failure.is_echo or (failure.is_error and rank() > 0)
    if path is None or not is_repeated:
        sys.stderr.write(failure.text)
    return failure.exit_status


def _run(command: Sequence[str], num_workers: int, threads: int, folder: str) -> int:
    with _handlers_kept() as signals, worker_environment(threads, signals), _quiet():
        agent = _agent(command, num_workers, folder)
        try:
            result = agent.run()
        finally:
            agent.spec.rdzv_handler.shutdown()
    return _explain(result.failures, num_workers) if result.is_failed() else 0


class _Agent(LocalElasticAgent):
    """The elastic agent, except for what a second signal does, and that stopped workers are woken to end.

    A second signal kills the workers instead of waiting once more, unless it comes so soon that it is the
    first one's echo.
    """

    _is_stopping = False
    _signalled_s: float | None = None

    @property
    def spec(self) -> WorkerSpec:
        return self._worker_group.spec

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        for number in _HANDLED:
            if not is_ignored(number):
                signal.signal(number, self._receive)
        return pids

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._signalled_s is None:
            self._signalled_s = now_s
        elif now_s - self._signalled_s <= ECHO_S:
            return
        raise SignalException("", signal.Signals(number))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Once one has failed, torch gives the others time to end, which those that are stopped never use.
        workers = cast(SubprocessContext, self._pcontext).subprocess_handlers.values()
        if any(worker.proc.poll() for worker in workers):
            self._wake()
        return cast(RunResult, super()._monitor_workers(worker_group))

    def _wake(self) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        # The signal handler raises out of the first call, and the agent cleans up with another.
        chosen = signal.SIGKILL if self._is_stopping else death_sig
        self._is_stopping = True
        self._wake()
        super()._shutdown(chosen, timeout)
        self._is_stopping = False


def _agent(command: Sequence[str], num_workers: int, folder: str) -> _Agent:
    # The port is chosen by the operating system when the agent opens its store: no race for a free one.
    rendezvous = RendezvousParameters(
        "c10d", "localhost:0", run_id="samestep", min_nodes=1, max_nodes=1, local_addr="localhost"
    )
    spec = WorkerSpec(
        role="worker",
        local_world_size=num_workers,
        rdzv_handler=get_rendezvous_handler(rendezvous),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        local_addr="localhost",
    )
    return _Agent(spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=GRACE_S)


@contextmanager
def _handlers_kept() -> Iterator[list[str]]:
    """Yield the signals that the agent should handle, and put back what it replaces."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        # Under nohup, SIGHUP is ignored and has to stay so.
        yield [number.name for number in _HANDLED if not is_ignored(number)]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's own log from the terminal: it repeats, at length, what `_explain` says in a line."""
    logger = logging.getLogger("torch.distributed.elastic")
    silent, propagated = logging.NullHandler(), logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(silent)


def _explain(failures: Mapping[int, ProcessFailure], num_workers: int) -> int:
    """Write the root cause to stderr and return the job's exit status."""
    first_seen_s = min(failure.timestamp for failure in failures.values())
    described = [
        (
            worker,
            Failure.read(Path(failure.error_file)) or _silent(failure, worker, num_workers, first_seen_s),
        )
        for worker, failure in failures.items()
    ]
    worker, cause = root_cause(described)
    sys.stderr.write(cause.text)
    if not cause.is_recorded:  # the workers that missed it know the step
        sys.stderr.write(next((found.text for _, found in described if found.is_error), ""))
    if cause.is_recorded and cause.text and not cause.is_error:
        sys.stderr.write(f"samestep: worker {worker} of {num_workers} failed; the job was stopped\n")
    return cause.exit_status


def _silent(failure: ProcessFailure, worker: int, num_workers: int, first_seen_s: int) -> Failure:
    """Describe a worker that died without leaving a record."""
    how = f"exited with status {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    # The agent ends the others by SIGTERM, and by SIGKILL those still there after the grace period.
    by_agent = failure.exitcode == -signal.SIGTERM or failure.timestamp - first_seen_s >= GRACE_S // 2
    text = f"samestep: worker {worker} of {num_workers} (pid {failure.pid}) {how}; the job was stopped\n"
    return Failure(text, 1, is_echo=by_agent, is_recorded=False)


def _left_behind(folder: Path) -> list[Failure]:
    """Return what went wrong in workers that were asked to stop, other than by losing each other."""
    found = [Failure.read(path) for path in sorted(folder.glob("**/error.json"))]
    by_text = {failure.text: failure for failure in found if failure and not failure.is_echo}
    return list(by_text.values())
