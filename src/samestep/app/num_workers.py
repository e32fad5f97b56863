"""How many workers a run has: a number, or one for each core or GPU of the machine."""

from __future__ import annotations

import os
from typing import Literal

import torch

from samestep.errors import ConfigError
from samestep.summation.placement import Placement
from samestep.workers.device import check_threads, device_named, num_cores
from samestep.workers.environment import under_launcher

__all__ = ["resolve_workers"]


def resolve_workers(
    workers: int | Literal["auto"], towers: int, device: str = "auto", *, threads: int = 1
) -> int:
    """Return the number of workers W that `--workers` asks for.

    Under a launcher W is what the launcher started. Otherwise "auto" is one worker per GPU, or one per
    `threads` cores available to this process, and in any case at most one per tower.

    Args:
        workers: a number, or "auto".
        towers: logical slices of the global batch, T.
        device: as for `init`.
        threads: CPU threads of each worker.

    Returns:
        W, with 1 <= W <= T.

    Raises:
        ConfigError: more workers than towers, or not as many as the launcher started; threads below 1.
    """
    check_threads(threads)
    if under_launcher():
        started = int(os.environ["WORLD_SIZE"])
        if workers not in ("auto", started):
            raise ConfigError(
                f"workers = {workers}, but the launcher started {started} processes (WORLD_SIZE={started}): "
                f"start {workers} processes, or leave out --workers"
            )
        return Placement.even(towers, started).num_workers
    if workers != "auto":
        return Placement.even(towers, workers).num_workers
    on_cpu = device_named(device, 0).type == "cpu"
    available = num_cores() // threads if on_cpu else torch.cuda.device_count()
    return max(1, min(towers, available))
