"""Scripts that start their own workers."""

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
from samestep.errors import ConfigError, UsageError
from samestep.workers.environment import check_environment, under_launcher
from samestep.workers.job import Job, init
from samestep.workers.process import DEFAULT_TIMEOUT_S, imports_script
from samestep.workers.rendezvous import has_group

__all__ = ["join", "launch"]

_OF_SIGNALS = range(129, 256)
_CALL = "SAMESTEP_CALL"
"""The variable that tells a worker for which of its script's calls of `launch` it was started."""


@dataclass
class _Calls:
    """The calls of `launch` that this process's script has made.

    Attributes:
        wanted: the one for which this process was started as a worker; None where it is no such worker.
        num: how many there were, by the name of what each was to run.
    """

    wanted: str | None
    num: Counter[str] = field(default_factory=Counter)

    @classmethod
    @cache
    def of_process(cls) -> _Calls:
        return cls(os.environ.pop(_CALL, None))  # else what this process starts would take it for its own

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
    """Run `main(job)` on workers of this host: each of them runs this script again, up to here, and ends.

    So what follows the call is for the process that made it, where variables are as before: let `main` leave
    results in files. Under torchrun, or in workers that have made torch's process group, and with one worker,
    `main` is called at once, and the script goes on wherever it was. A `samestep.Error` ends the script as it
    ends a command: one line, and its exit status.

    Args:
        main: what each worker does.
        workers: processes to start, W; "auto" is one for each GPU, or one for `threads` cores.
        towers: the T of `main`, as "auto" is at most one worker for each tower.
        device: as for `init`, and so are the others.
        threads: CPU threads of each worker.
        tf32: let the GPU round to TF32.
        timeout_s: seconds to wait for another worker.
        nnodes: hosts of the job, "N" or "MIN:MAX", each of which runs this script; None for this one alone.
        rdzv_endpoint: "HOST" or "HOST:PORT" where they meet: one of them, which must not be lost.
        rdzv_id: tells the job from others that meet there.

    Raises:
        SystemExit: it failed, or a signal ended it.

    Example:
        >>> launch(lambda job: print(f"worker {job.rank} of {job.world_size}"), workers=1)
        worker 0 of 1
    """
    check_no_import("samestep.launch")
    if imports_script():  # a process of a DataLoader, say, which is to do its own work
        return
    calls = _Calls.of_process()
    call = calls.next(main)
    if calls.wanted not in (None, call):
        atexit.register(_end_in_vain, calls)  # does no harm when the call comes
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
    """Do a worker's part, and leave the job once all do, also where a signal stopped them all."""
    own = os.getpid()
    try:
        main(job)
    except SystemExit as stop:
        is_well = not stop.code or stop.code in _OF_SIGNALS
        if is_well and os.getpid() == own:  # else the others need not wait to hear what went wrong
            job.close()
        raise
    if os.getpid() == own:  # and not that of a process that main has forked
        job.close()


def _has_script() -> bool:
    return getattr(sys.modules["__main__"], "__file__", None) is not None


@contextmanager
def _workers_for(call: str) -> Iterator[None]:
    """Tell the workers that are started meanwhile for which call that is."""
    os.environ[_CALL] = call
    try:
        yield
    finally:
        del os.environ[_CALL]


def _end_in_vain(calls: _Calls) -> None:
    """Fail at the end of a worker's script that has not come to the call, unless something else has."""
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
