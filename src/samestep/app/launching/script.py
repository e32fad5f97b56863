"""Scripts that start their own workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from samestep.app.launching.launch import run_command, run_worker
from samestep.app.launching.nodes import DEFAULT_ID, Nodes
from samestep.app.launching.num_workers import resolve_workers
from samestep.app.output import lasting_output
from samestep.errors import ConfigError
from samestep.workers.environment import check_environment, under_launcher
from samestep.workers.job import Job, init
from samestep.workers.process import DEFAULT_TIMEOUT_S

__all__ = ["join", "launch"]

_OF_SIGNALS = range(129, 256)


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
    """Run `main(job)` on workers of this host: each of them runs this script again, up to here.

    Under torchrun, which has started the workers already, and with one worker, `main` is called at once. A
    `samestep.Error` ends the script as it ends a command: one line, and its exit status.

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
    most = 1 if workers == "auto" and not _has_script() else towers

    def work() -> int:
        check_environment()
        if not under_launcher():
            number = resolve_workers(workers, most, device, threads=threads)
            nodes = Nodes.of(nnodes, rdzv_endpoint, rdzv_id)
            if nodes is not None:
                nodes = replace(nodes, timeout_s=timeout_s, most_workers=towers)
            if number > 1 or nodes is not None:
                return run_command(_same_command(), number, threads=threads, nodes=nodes)
        job = init(device, threads=threads, tf32=tf32, timeout_s=timeout_s)
        join(job, main)
        return 0

    with lasting_output():
        status = run_worker(work)
    if status:
        sys.exit(status)


def join(job: Job, main: Callable[[Job], object]) -> None:
    """Do a worker's part, and leave the job once all do, also where a signal stopped them all."""
    try:
        main(job)
    except SystemExit as stop:
        if not stop.code or stop.code in _OF_SIGNALS:  # else the others need not wait to hear what went wrong
            job.close()
        raise
    job.close()


def _has_script() -> bool:
    return getattr(sys.modules["__main__"], "__file__", None) is not None


def _same_command() -> list[str]:
    if not _has_script():
        raise ConfigError(
            "launch: each worker runs the script again, and there is none here: write it to a file, or use "
            "workers=1"
        )
    return [sys.executable, *sys.orig_argv[1:]]
