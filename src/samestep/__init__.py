"""Training that averages gradients over towers: the same step, bit for bit, on any number of workers."""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers treat the name as true; importing `typing` takes a while
if TYPE_CHECKING:
    __version__: str

    from samestep.app.callbacks import Callback as Callback, Logger as Logger
    from samestep.app.elastic import Elastic as Elastic
    from samestep.app.evaluation import Evaluation as Evaluation
    from samestep.app.launching.script import launch as launch
    from samestep.app.loggers.tensorboard import TensorBoard as TensorBoard
    from samestep.app.loggers.wandb import WandB as WandB
    from samestep.app.settings import Settings as Settings
    from samestep.app.trainer import Trainer as Trainer, TrainingResult as TrainingResult
    from samestep.batches.batch import LocalBatch as LocalBatch
    from samestep.batches.columns import Whole as Whole
    from samestep.checking.result import CheckResult as CheckResult, check as check
    from samestep.checkpoint.manifest import Manifest as Manifest
    from samestep.checkpoint.saving import load as load, save as save
    from samestep.data.loader import TowerLoader as TowerLoader
    from samestep.data.readers import BatchedDataset as BatchedDataset
    from samestep.data.stream_loader import StreamLoader as StreamLoader
    from samestep.errors import (
        AbandonedError as AbandonedError,
        BatchError as BatchError,
        BufferPolicyError as BufferPolicyError,
        ConfigError as ConfigError,
        DamagedError as DamagedError,
        DataError as DataError,
        DisagreementError as DisagreementError,
        Error as Error,
        LoaderError as LoaderError,
        LockedError as LockedError,
        LostWorkerError as LostWorkerError,
        MissingFileError as MissingFileError,
        NonFiniteError as NonFiniteError,
        StorageError as StorageError,
        UsageError as UsageError,
    )
    from samestep.identity import digest as digest
    from samestep.sharding.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from samestep.summation.gradients import average_gradients as average_gradients
    from samestep.summation.placement import Placement as Placement
    from samestep.towers.losses import LossSum as LossSum
    from samestep.towers.report import Report as Report
    from samestep.towers.step import Step as Step
    from samestep.towers.tower import Tower as Tower
    from samestep.towers.towers import Towers as Towers
    from samestep.workers.job import Job as Job, init as init

_HOMES = {
    "app.callbacks": ("Callback", "Logger"),
    "app.elastic": ("Elastic",),
    "app.evaluation": ("Evaluation",),
    "app.launching.script": ("launch",),
    "app.settings": ("Settings",),
    "app.loggers.tensorboard": ("TensorBoard",),
    "app.trainer": ("Trainer", "TrainingResult"),
    "app.loggers.wandb": ("WandB",),
    "batches.batch": ("LocalBatch",),
    "batches.columns": ("Whole",),
    "checking.result": ("CheckResult", "check"),
    "checkpoint.manifest": ("Manifest",),
    "checkpoint.saving": ("load", "save"),
    "data.loader": ("TowerLoader",),
    "data.readers": ("BatchedDataset",),
    "data.stream_loader": ("StreamLoader",),
    "errors": (
        "AbandonedError",
        "BatchError",
        "BufferPolicyError",
        "ConfigError",
        "DamagedError",
        "DataError",
        "DisagreementError",
        "Error",
        "LoaderError",
        "LockedError",
        "LostWorkerError",
        "MissingFileError",
        "NonFiniteError",
        "StorageError",
        "UsageError",
    ),
    "identity": ("digest",),
    "sharding.sharded_optimizer": ("ShardedOptimizer",),
    "summation.gradients": ("average_gradients",),
    "summation.placement": ("Placement",),
    "towers.losses": ("LossSum",),
    "towers.report": ("Report",),
    "towers.tower": ("Tower",),
    "towers.step": ("Step",),
    "towers.towers": ("Towers",),
    "workers.job": ("Job", "init"),
}
_MODULES = {name: f"samestep.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name != "__version__" and name not in _MODULES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    from importlib import import_module

    value = _version() if name == "__version__" else getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("samestep")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
