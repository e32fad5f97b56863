"""`samestep.launch`, by which a script starts its own workers."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

from samestep.app.launching.launch import run_command, run_worker
from samestep.app.launching.nodes import DEFAULT_ID, Nodes
from samestep.app.launching.num_workers import resolve_workers
from samestep.app.output import lasting_output
from samestep.app.recipe_file import check_no_import
from samestep.arguments import check_callable
from samestep.errors import ConfigError, UsageError
from samestep.workers.default_group import has_group
from samestep.workers.environment import check_environment, under_launcher
from samestep.workers.job import Job, init
from samestep.workers.process import DEFAULT_TIMEOUT_S, imports_script

__all__ = ["join", "launch"]

_OF_SIGNALS = range(129, 256)
_CALL = "SAMESTEP_CALL"
"""The variable that names the call of `launch` for which a worker was started: a script may make several."""


@dataclass
class _Calls:
    """The calls of `launch` that this process's script has made.

    Attributes:
        wanted: the call for which this process was started as a worker; None if it is not such a worker.
        num: the number of calls so far, by the name of their `main`.
    """

    wanted: str | None
    num: Counter[str] = field(default_factory=Counter)

    @classmethod
    @cache
    def of_process(cls) -> _Calls:
        return cls(os.environ.pop(_CALL, None))  # removed, so that child processes do not inherit it

    def next(self, main: Callable[[Job], object]) -> str:
        name = getattr(main, "__qualname__", type(main).__qualname__)
        self.num[name] += 1
        return f"launch({name}), call {self.num[name]}"


def launch(  # noqa: PLR0913 - what `init` takes
    main: Callable[[Job], object],
    workers: int | Literal["auto"] = "auto",
    *,
    towers: int | None = None,
    device: str = "auto",
    threads: int = 1,
    tf32: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    nnodes: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str = DEFAULT_ID,
) -> None:
    """Run `main(job)` on workers of this host.

    Each worker runs this script up to this call, calls `main`, and exits. Only the process that was started
    first continues, with its variables unchanged: let `main` write results to files. With one worker, under
    torchrun, or in processes that have created torch's process group, `main` is called directly, and the
    script continues in each process. A `samestep.Error` ends the script with one line on stderr and the
    error's exit status. Workers are started from the main thread only.

    Args:
        main: called in each worker.
        workers: number of processes to start, W; "auto" is one per GPU, or one per `threads` cores.
        towers: the number of towers in `main`, T; "auto" starts at most one worker per tower.
        device: as for `init`.
        threads: CPU threads of each worker.
        tf32: let the GPU round to TF32.
        timeout_s: seconds to wait for another worker.
        nnodes: number of hosts, "N" or "MIN:MAX", each of which runs this script; None for this host alone.
        rdzv_endpoint: "HOST" or "HOST:PORT" of the host at which all hosts meet; the job ends if it is lost.
        rdzv_id: name of the job; jobs with the same `rdzv_endpoint` need different names.

    Raises:
        SystemExit: `main` failed, or a signal ended the job.

    Example:
        >>> launch(lambda job: print(f"worker {job.rank} of {job.world_size}"), workers=1)
        worker 0 of 1
    """
    check_callable("main", main, "a function main(job)")
    check_no_import("samestep.launch")
    if imports_script():  # such as a DataLoader's process, which imports the script for its own work
        return
    calls = _Calls.of_process()
    call = calls.next(main)
    if calls.wanted not in (None, call):
        atexit.register(_end_in_vain, calls)  # has no effect if the wanted call comes later
        return
    most = 1 if workers == "auto" and not _has_script() else towers

    def work() -> int:
        check_environment()
        if not (under_launcher() or has_group()):
            number = resolve_workers(workers, most, device, threads=threads)
            nodes = Nodes.of(nnodes, rdzv_endpoint, rdzv_id)
            if nodes is not None:
                nodes = replace(nodes, timeout_s=timeout_s, most_workers=towers)
            if number > 1 or nodes is not None:
                with _workers_for(call):
                    return run_command(_same_command(), number, threads=threads, nodes=nodes)
        job = init(device, threads=threads, tf32=tf32, timeout_s=timeout_s)
        join(job, main)
        return 0

    with lasting_output():
        status = run_worker(work)
    if status or calls.wanted is not None:
        calls.wanted = None
        sys.exit(status)


def join(job: Job, main: Callable[[Job], object]) -> None:
    """Call `main`, and leave the job together with the other workers, also if a signal stopped them all."""
    own = os.getpid()
    try:
        main(job)
    except SystemExit as stop:
        is_well = not stop.code or stop.code in _OF_SIGNALS
        if is_well and os.getpid() == own:  # after an error, exit at once, so that the others notice it
            job.close()
        raise
    if os.getpid() == own:  # not in a process that main has forked
        job.close()


def _has_script() -> bool:
    return getattr(sys.modules["__main__"], "__file__", None) is not None


@contextmanager
def _workers_for(call: str) -> Iterator[None]:
    """Let the workers that are started inside the block know for which call they are."""
    os.environ[_CALL] = call
    try:
        yield
    finally:
        del os.environ[_CALL]


def _end_in_vain(calls: _Calls) -> None:
    """Fail at the end of a worker's script without the wanted call, unless the script has failed already."""
    if calls.wanted is None or hasattr(sys, "last_value"):
        return
    error = UsageError(
        f"{calls.wanted}: a worker's script ended without this call: expected the same calls of "
        "samestep.launch as in the first process; decide inside main what to do"
    )
    calls.wanted = None
    with lasting_output():
        status = run_worker(partial(_raise, error))
    os._exit(status)


def _raise(error: Exception) -> int:
    raise error


def _same_command() -> list[str]:
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "launch: workers run the script again, but this is a multiprocessing process: call it in the "
            "script's first process, or call samestep.init() in processes that make torch's process group"
        )
    if not _has_script():
        raise ConfigError(
            "launch: each worker runs the script again, but this program has no script file: write it to a "
            "file, or use workers=1"
        )
    return [sys.executable, *sys.orig_argv[1:]]
