"""Regrouping after workers were lost or have joined, for `Trainer` and `Elastic`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from samestep.checkpoint.objects import TrainingObjects
from samestep.errors import ConfigError, LostWorkerError
from samestep.workers.job import Job
from samestep.workers.transport import Renewable

__all__ = ["meet_again", "renewable_of", "report_regroup"]


def renewable_of(job: Job, objects: TrainingObjects) -> Renewable | None:
    """Return the transport if the job can continue without a lost worker; otherwise None."""
    if job.renewable is None or not objects.are_sharded:
        return job.renewable
    if job.is_newcomer:
        raise ConfigError(
            "a worker cannot join a run whose optimizer is sharded: no other worker has its shard"
        )
    if job.is_first:
        sys.stderr.write(
            "samestep: the optimizer is sharded, so all workers end if one is lost; the same command then "
            "continues from the last checkpoint\n"
        )
    return None


def meet_again(job: Job, catch_up: Callable[[], None]) -> None:
    """Form a new process group and call `catch_up`; repeat both until no worker is lost meanwhile.

    Raises:
        LostWorkerError: the others do not join within the timeout.
    """
    assert job.renewable is not None
    while True:
        job.renewable.regroup()
        try:
            return catch_up()
        except LostWorkerError:
            continue


def report_regroup(why: str, job: Job, step: int) -> None:
    """Print why the workers regrouped, and how many there are now."""
    workers = f"{job.world_size} worker{'s' * (job.world_size > 1)}"
    sys.stderr.write(f"samestep: {why}; going on with {workers} after step {step}\n")
