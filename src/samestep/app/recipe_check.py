"""`samestep check RECIPE`: `samestep.check` on a recipe's own step and batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from samestep.app.settings import Settings, trainer_of
from samestep.checking.examination import Plan
from samestep.checking.result import NUM_STEPS, WORKERS, CheckResult, examine
from samestep.summation.placement import Placement
from samestep.towers.step import Step
from samestep.workers.device import set_tf32
from samestep.workers.job import Job

__all__ = ["check_recipe"]


def check_recipe(settings: Settings) -> CheckResult:
    """Check a recipe with the settings that `samestep train` would use.

    Trains on the recipe's first batches with one worker, twice, and then with two and three workers, or with
    `settings.workers`.

    Raises:
        ConfigError: as for `samestep.check`; or there are more workers than towers.
    """
    workers = WORKERS if settings.workers == "auto" else (settings.workers,)
    Placement.even(settings.towers, 1 if settings.workers == "auto" else settings.workers)
    plan = Plan(min(NUM_STEPS, settings.steps), workers, True, settings.device, settings.threads)
    return replace(examine(_Recipe(settings), settings.towers, plan), name=settings.recipe)


@dataclass(frozen=True)
class _Recipe:
    """A recipe's step and the batches of its own loader."""

    settings: Settings

    def __call__(self, job: Job) -> tuple[Step, Iterable[Any]]:
        if job.device.type == "cuda":  # `examine` starts the job without TF32
            set_tf32(self.settings.tf32)
        trainer = trainer_of(self.settings, job)
        loader = trainer.loader
        return trainer.step, itertools.chain.from_iterable(itertools.repeat(loader))
