"""The number of workers of a run: a given number, or one per core or GPU of the machine."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from samestep.arguments import whole
from samestep.errors import ConfigError
from samestep.summation.placement import Placement
from samestep.workers.environment import launched_by_samestep, under_launcher, world_size
from samestep.workers.process import check_threads

__all__ = ["num_cores", "resolve_workers"]

_WORKERS_PER_CORE = 32
_CGROUP = Path("/sys/fs/cgroup")


def resolve_workers(
    workers: int | Literal["auto"], towers: int | None, device: str = "auto", *, threads: int = 1
) -> int:
    """Return the number of workers W that `--workers` asks for.

    Under a launcher, W is the number of workers that the launchers of all hosts started. Otherwise "auto" is
    one worker per GPU, or one per `threads` cores available to this process, and at most one per tower.

    Args:
        workers: a number, or "auto".
        towers: logical slices of the global batch, T; None if not known yet.
        device: as for `init`.
        threads: CPU threads of each worker.

    Returns:
        W, with 1 <= W <= T.

    Raises:
        ConfigError: W is above T or the number that this machine can start, or differs from the number that
            the launcher started; or `threads` is out of range.
    """
    check_threads(threads)
    if workers != "auto":
        whole("workers", workers, 1, 'or "auto"')
    if under_launcher():
        started = world_size()
        if workers not in ("auto", started) and not launched_by_samestep():
            raise ConfigError(
                f"workers = {workers}, but the launcher started {started} processes (WORLD_SIZE={started}): "
                f"start {workers} processes, or leave out --workers"
            )
        return _placed(towers, started)
    if workers != "auto":
        _check_fits(workers)
        return _placed(towers, workers)
    most = _num_gpus(device) or num_cores() // threads
    return max(1, most if towers is None else min(towers, most))


def num_cores() -> int:
    """Return how many CPU cores this process may use, by its affinity and its container's CPU quota."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Return how many cores a container may use, as set by `docker run --cpus`; infinite without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroups v2, v1
        with suppress(OSError, ValueError):  # without a limit, the quota is "max" or -1
            quota, period = map(int, " ".join((_CGROUP / name).read_text() for name in names).split())
            return quota / period if quota > 0 and period > 0 else math.inf
    return math.inf


def _placed(towers: int | None, workers: int) -> int:
    return workers if towers is None else Placement.even(towers, workers).num_workers


def _check_fits(workers: int) -> None:
    most = _WORKERS_PER_CORE * num_cores()
    if workers > most:
        raise ConfigError(
            f"workers = {workers}: expected at most {most}, {_WORKERS_PER_CORE} for each core it may use"
        )


def _num_gpus(device: str) -> int:
    if device == "cpu":
        return 0
    import torch  # here, because importing it takes seconds, and a launcher on CPUs does not need it

    from samestep.workers.device import device_named

    return 0 if device_named(device, 0).type == "cpu" else torch.cuda.device_count()
