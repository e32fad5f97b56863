"""Code that a test writes: in a file, because samestep reads the source code of what runs."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .simulation import simulate


def imported(code: str, path: Path) -> ModuleType:
    """Write code to a new file, and return it as a module."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Ran(NamedTuple):
    """What became of a program: its warnings, and what its workers raised or returned."""

    warnings: list[str]
    errors: list[BaseException]
    values: set[Any]

    @property
    def told(self) -> list[str]:
        """The texts of warnings and errors."""
        return self.warnings + list(map(str, self.errors))


def ran(program: Callable[[Any], Any], num_workers: int) -> Ran:
    """Run a program on simulated workers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = simulate(program, num_workers)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return Ran([str(each.message) for each in caught], errors, {outcome.value for outcome in outcomes})
