"""Runs of recipes in this process."""

from samestep.app.settings import Settings
from samestep.workers.job import Job


def train(settings: Settings, job: Job) -> int:
    """Do what `samestep train` does; return its exit status."""
    try:
        settings.build(job).run()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
