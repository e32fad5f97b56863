"""The environment variables that a launcher sets for its workers."""

from __future__ import annotations

import os
from pathlib import Path

from samestep.errors import ConfigError, shown, warn

__all__ = [
    "JOB",
    "LIFELINE",
    "NUMBER",
    "PER_HOST",
    "check_environment",
    "error_file",
    "is_first",
    "launched_by_samestep",
    "local_rank",
    "may_restart",
    "note_joined",
    "rank",
    "rank_environment",
    "under_launcher",
    "warn_if_unranked",
    "worker_environment",
    "world_size",
]

LIFELINE = "SAMESTEP_LIFELINE"
"""Holds the file descriptor of a worker's lifeline and, after a colon, the signal that the worker gets when
the lifeline is closed (by default SIGTERM). See `end_with_launcher`."""

NUMBER = "SAMESTEP_NUMBER"
"""Holds a worker's number, if its launcher replaces lost workers."""

PER_HOST = 1_000_000
"""The numbers of workers on host h start at h times this."""

JOB = "SAMESTEP_JOB"
"""Holds the name of a job whose launcher replaces lost workers."""

_JOINED = "SAMESTEP_JOINED"
"""Holds the process that has already joined the environment's job, and its rank and address."""

_STARTED_TOGETHER = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables that srun, Open MPI and MPICH set: the number of processes, and the rank of this process."""

_MAX_WORKERS = 65_536


def under_launcher() -> bool:
    """Whether a launcher such as torchrun started this process and gave it a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_by_samestep() -> bool:
    """Whether `samestep.app.launching` started this process; that launcher reports workers' errors itself."""
    return "SAMESTEP_LAUNCHED" in os.environ


def may_restart() -> bool:
    """Whether the launcher restarts failed workers itself."""
    return _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0


def is_first() -> bool:
    """Whether this is worker 0, or there is no launcher. It never raises, because error reports call it."""
    return os.environ.get("RANK", "0").strip() == "0"


def rank() -> int:
    """Return this worker's rank; 0 without a launcher."""
    return _number("RANK", 0)


def local_rank(default: int = 0) -> int:
    """Return this worker's rank on its host; `default` without a launcher."""
    return _number("LOCAL_RANK", default)


def world_size() -> int:
    """Return the number of workers in the job; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def check_environment() -> None:
    """Raise a `ConfigError` if a launcher's variables are incomplete or have invalid values."""
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if one in os.environ and other not in os.environ:
            raise ConfigError(
                f"{one} is set and {other} is not: expected both, as torchrun sets them, or neither"
            )
    local_rank()
    if not 1 <= world_size() <= _MAX_WORKERS:
        raise ConfigError(f"WORLD_SIZE={world_size()}: expected 1 <= WORLD_SIZE <= {_MAX_WORKERS:,}")
    if rank() >= world_size():
        raise ConfigError(f"RANK={rank()}: expected 0 <= RANK < WORLD_SIZE = {world_size()}")
    if world_size() > 1:
        _check_address()


def note_joined() -> None:
    """Mark this rank of the job as taken, in the environment of processes that this one starts.

    Raises:
        ConfigError: the process that started this one has taken the rank.
    """
    place = " ".join(os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    process, _, taken = os.environ.get(_JOINED, "").partition(" ")
    if taken == place and process != str(os.getpid()):
        raise ConfigError(
            f"RANK={rank()} is the rank of process {process}, which started this one: remove RANK and "
            "WORLD_SIZE from the environment of programs that do not belong to the job"
        )
    os.environ[_JOINED] = f"{os.getpid()} {place}"


def warn_if_unranked() -> None:
    """Warn if this process was started together with others, as by srun, but without RANK and WORLD_SIZE."""
    if under_launcher():
        return
    for how_many, which in _STARTED_TOGETHER.items():
        number = os.environ.get(how_many, "")
        if number.isdigit() and int(number) > 1 and os.environ.get(which) == "0":
            warn(
                f"{number} processes were started together ({how_many}={number}), without RANK and "
                "WORLD_SIZE: each trains all towers by itself; to make them workers of one job, start them "
                "with torchrun"
            )
            return


def _check_address() -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not set: {world_size()} workers need the address at which they find "
            "worker 0; start them with torchrun, or set it as torchrun does"
        )
    if _number("MASTER_PORT", 0) >= 2**16:
        raise ConfigError(f"MASTER_PORT={_number('MASTER_PORT', 0)}: expected a port below 65,536")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{name}={shown(text)}: expected a whole number, as torchrun sets it; or unset it")
    return int(text)


def error_file() -> Path | None:
    """Return the file from which torch's launcher reads this worker's error; None without a launcher."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def rank_environment(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of a worker in a job on this host, whose store the launcher has opened."""
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
    """Return the environment that all workers share, with this number of CPU threads."""
    return {
        "SAMESTEP_LAUNCHED": "1",
        "OMP_NUM_THREADS": str(threads),  # read by libraries that size their thread pools at start
        "MKL_NUM_THREADS": str(threads),
    }
