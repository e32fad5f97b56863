"""Code that a test writes: in a file, because samestep reads the source code of what runs."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import samestep

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


def check_told(code: str, path: Path, *, ignored: str = "-", is_seen_alone: bool = False) -> None:
    """Run a module's function `program` on 1 to 3 workers: it returns the same, or workers are told why not.

    An error is the same kind on all workers: one of samestep's, or torch's of what is wrong without it, too.

    Args:
        code: the module's.
        path: the file to write it to.
        ignored: how warnings begin that do not count.
        is_seen_alone: whether a single worker is to be told, too, and not only several.
    """
    module = imported(code, path)
    values, told = set(), {}
    for num_workers in (1, 2, 3):
        found = ran(module.program, num_workers)
        are_expected = all(isinstance(e, samestep.Error) or "inplace" in str(e) for e in found.errors)
        assert are_expected, f"{found.errors}\n{code}"
        assert len(found.errors) in (0, num_workers), f"{found.errors}\n{code}"
        values |= found.values if is_seen_alone else found.values - {None}
        told[num_workers] = any(not each.startswith(ignored) for each in found.told)
    are_told = told[2] and told[3] and (told[1] or not is_seen_alone)
    assert len(values) <= 1 or are_told, code
