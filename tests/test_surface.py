"""The public names are a contract: other people's scripts use them."""

import importlib
import inspect
import pkgutil

import samestep
from samestep import errors

PUBLIC = {
    "BatchedDataset", "CheckResult", "Job", "LocalBatch", "Manifest", "Report", "Step", "Tower",
    "TowerLoader", "Towers",
    "BatchError", "BufferError", "ConfigError", "DamagedError", "DataError", "DisagreementError", "Error",
    "LockedError", "LostWorkerError", "MissingFileError", "NonFiniteError", "StorageError", "UsageError",
    "average_gradients", "check", "digest", "init", "load", "save",
}  # fmt: skip


def modules():
    return [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(samestep.__path__, "samestep.")
        if not info.name.endswith("__main__")
    ]


def test_public_names_are_exactly_these():
    assert set(samestep.__all__) == PUBLIC


def test_all_error_classes_are_exported():
    found = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert all(getattr(samestep, name) is value for name, value in found.items())


def test_each_module_says_what_it_gives():
    for module in modules():
        if module.__name__.count(".") == 1 or not hasattr(module, "__path__"):
            for name in getattr(module, "__all__", []):
                assert hasattr(module, name), f"{module.__name__}.{name}"


def test_public_things_are_documented():
    for name in samestep.__all__:
        assert inspect.getdoc(getattr(samestep, name)), name
