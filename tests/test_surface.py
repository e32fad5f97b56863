"""The public names are a contract: other people's scripts use them."""

import importlib.util
import inspect
import pkgutil
import subprocess
import sys

import pytest

import samestep
from samestep import errors

PUBLIC = {
    "BatchedDataset", "CheckResult", "Job", "LocalBatch", "LossSum", "Manifest", "Placement", "Report",
    "ShardedOptimizer", "Step", "StreamLoader", "Tower", "TowerLoader", "Towers", "Whole",
    "Callback", "Elastic", "Evaluation", "Logger", "Settings", "TensorBoard", "Trainer", "TrainingResult",
    "WandB", "launch",
    "AbandonedError", "BatchError", "BufferPolicyError", "ConfigError", "DamagedError", "DataError",
    "DisagreementError",
    "Error", "LoaderError", "LockedError", "LostWorkerError", "MissingFileError", "NonFiniteError",
    "StorageError", "UsageError", "average_gradients", "check", "digest", "init", "load", "save",
}  # fmt: skip


def has_its_package(module):
    """Say whether the package is there that a module of samestep.integrations is for."""
    _, _, package = module.partition("samestep.integrations.")
    return not package or importlib.util.find_spec(package.partition(".")[0]) is not None


def modules():
    return [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(samestep.__path__, "samestep.")
        if not info.name.endswith("__main__") and has_its_package(info.name)
    ]


def test_public_names_are_exactly_these():
    assert set(samestep.__all__) == PUBLIC


def test_all_error_classes_are_exported():
    values = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    found = {name: value for name, value in values.items() if issubclass(value, Exception)}
    assert all(getattr(samestep, name) is value for name, value in found.items())


def test_each_module_says_what_it_gives():
    for module in modules():
        if module.__name__.count(".") == 1 or not hasattr(module, "__path__"):
            for name in getattr(module, "__all__", []):
                assert hasattr(module, name), f"{module.__name__}.{name}"


def test_public_things_are_documented():
    for name in samestep.__all__:
        assert inspect.getdoc(getattr(samestep, name)), name


@pytest.mark.long
def test_the_library_needs_none_of_the_packages_of_the_extra():
    program = """if True:
        import sys
        import samestep
        assert "torch" not in sys.modules
        for name in samestep.__all__:
            getattr(samestep, name)
        assert not {"PIL", "matplotlib", "requests", "rich", "tensorboard", "wandb"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", program], check=True)
