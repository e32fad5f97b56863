"""What a trainer and a loop of one's own do alike where workers were lost, or come."""

from __future__ import annotations

import sys
from collections.abc import Callable

from samestep.errors import LostWorkerError
from samestep.workers.job import Job

__all__ = ["meet_again", "tell"]


def meet_again(job: Job, catch_up: Callable[[], None]) -> None:
    """Meet the others, until all who are there have caught up with each other.

    Raises:
        LostWorkerError: the others do not come.
    """
    assert job.renewable is not None
    while True:
        job.renewable.regroup()
        try:
            return catch_up()
        except LostWorkerError:  # another one, meanwhile
            continue


def tell(why: str, job: Job, step: int) -> None:
    """Print why the job goes on with other workers, and how many."""
    workers = f"{job.world_size} worker{'s' * (job.world_size > 1)}"
    sys.stderr.write(f"samestep: {why}; going on with {workers} after step {step}\n")
