"""The same step on any hardware: synchronous training that averages gradients over towers, bit for bit."""

from samestep.batch import LocalBatch
from samestep.check import check
from samestep.checkpoint import load, save
from samestep.digest import digest
from samestep.errors import Error
from samestep.job import Job, init
from samestep.loader import TowerLoader
from samestep.reduction import average_gradients
from samestep.report import Report
from samestep.step import Step
from samestep.tower import Tower
from samestep.towers import Towers

__all__ = [
    "Error",
    "Job",
    "LocalBatch",
    "Report",
    "Step",
    "Tower",
    "TowerLoader",
    "Towers",
    "average_gradients",
    "check",
    "digest",
    "init",
    "load",
    "save",
]
