"""The environment variables that a launcher sets for its workers, where torch has no function to ask."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "LIFELINE",
    "environment",
    "error_file",
    "launched_by_samestep",
    "may_restart",
    "rank",
    "seat",
    "under_launcher",
    "worker_environment",
    "world_size",
]

LIFELINE = "SAMESTEP_LIFELINE"
"""The variable that holds the file descriptor of a worker's lifeline; see `end_with_launcher`."""


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


def seat(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of one of the workers of this host, which meet at a store that is not theirs."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of every worker with so many CPU threads."""
    return {
        "SAMESTEP_LAUNCHED": "1",
        "OMP_NUM_THREADS": str(threads),  # for libraries that size their pools at start
        "MKL_NUM_THREADS": str(threads),
    }


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
