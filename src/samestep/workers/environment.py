"""The environment variables that a launcher sets for its workers, where torch has no function to ask."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = [
    "environment",
    "error_file",
    "launched_by_samestep",
    "may_restart",
    "rank",
    "under_launcher",
    "worker_environment",
    "world_size",
]


def under_launcher() -> bool:
    """Whether a launcher such as torchrun started this process and gave it a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_by_samestep() -> bool:
    """Whether `samestep.app.launch` started this process, and so shows the errors of all workers itself."""
    return "SAMESTEP_LAUNCHED" in os.environ


def may_restart() -> bool:
    """Whether the launcher starts failed workers again by itself."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def rank() -> int:
    """Return this worker's number, 0 where there is no launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of workers in the job, 1 where there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def error_file() -> Path | None:
    """Return the file in which torch's launcher looks for this worker's error; None without a launcher."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def worker_environment(threads: int, signals: list[str]) -> AbstractContextManager[None]:
    """Set, for a while, what workers inherit; `signals` names those that are passed on to them."""
    return environment(
        {
            "SAMESTEP_LAUNCHED": "1",
            "OMP_NUM_THREADS": str(threads),  # for libraries that size their pools at start
            "MKL_NUM_THREADS": str(threads),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),
        }
    )


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
