"""The same step on any number of workers: training that averages gradients over towers, bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.checking.result import CheckResult, check
    from samestep.checkpoint.manifest import Manifest
    from samestep.checkpoint.saving import load, save
    from samestep.data.loader import TowerLoader
    from samestep.data.readers import BatchedDataset
    from samestep.errors import (
        BatchError,
        BufferPolicyError,
        ConfigError,
        DamagedError,
        DataError,
        DisagreementError,
        Error,
        LockedError,
        LostWorkerError,
        MissingFileError,
        NonFiniteError,
        StorageError,
        UsageError,
    )
    from samestep.identity import digest
    from samestep.summation.gradients import average_gradients
    from samestep.towers.batch import LocalBatch
    from samestep.towers.report import Report
    from samestep.towers.run import Tower
    from samestep.towers.step import Step
    from samestep.towers.towers import Towers
    from samestep.workers.job import Job, init

__all__ = [
    "BatchError",
    "BatchedDataset",
    "BufferPolicyError",
    "CheckResult",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DisagreementError",
    "Error",
    "Job",
    "LocalBatch",
    "LockedError",
    "LostWorkerError",
    "Manifest",
    "MissingFileError",
    "NonFiniteError",
    "Report",
    "Step",
    "StorageError",
    "Tower",
    "TowerLoader",
    "Towers",
    "UsageError",
    "average_gradients",
    "check",
    "digest",
    "init",
    "load",
    "save",
]

_HOMES = {
    "BatchError": "errors",
    "BatchedDataset": "data.readers",
    "BufferPolicyError": "errors",
    "CheckResult": "checking.result",
    "ConfigError": "errors",
    "DamagedError": "errors",
    "DataError": "errors",
    "DisagreementError": "errors",
    "Error": "errors",
    "Job": "workers.job",
    "LocalBatch": "towers.batch",
    "LockedError": "errors",
    "LostWorkerError": "errors",
    "Manifest": "checkpoint.manifest",
    "MissingFileError": "errors",
    "NonFiniteError": "errors",
    "Report": "towers.report",
    "Step": "towers.step",
    "StorageError": "errors",
    "Tower": "towers.run",
    "TowerLoader": "data.loader",
    "Towers": "towers.towers",
    "UsageError": "errors",
    "average_gradients": "summation.gradients",
    "check": "checking.result",
    "digest": "identity",
    "init": "workers.job",
    "load": "checkpoint.saving",
    "save": "checkpoint.saving",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    value = getattr(import_module(f"samestep.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
