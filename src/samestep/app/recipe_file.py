"""Recipes in a user's own file: `samestep train path/to/file.py`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from samestep.app.bounds import describe, kinds_of
from samestep.app.settings import Settings
from samestep.errors import ConfigError, MissingFileError, one_line

__all__ = ["Recipes", "check_class", "check_no_import", "read_recipe"]

_being_imported: list[Path] = []


class Recipes(Mapping[str, "type[Settings]"]):
    """The installed recipes by name; a key that ends in .py is the path of a file with a recipe."""

    def __init__(self, installed: Mapping[str, type[Settings]]) -> None:
        self._installed = installed

    def __getitem__(self, name: str) -> type[Settings]:
        return read_recipe(Path(name)) if name.endswith(".py") else self._installed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._installed)

    def __len__(self) -> int:
        return len(self._installed)


def read_recipe(path: Path) -> type[Settings]:
    """Import a file, with its folder on `sys.path` as in `python path/to/file.py`, and return its recipe.

    Raises:
        ConfigError: the file cannot be imported, or has no or several subclasses of `samestep.Settings`.
        MissingFileError: there is no such file.
    """
    if not path.is_file():
        what = "not a file" if path.exists() else "not found"
        raise MissingFileError(f"{path}: {what}; expected a Python file with a recipe")
    if path.suffix != ".py" or "." in path.stem:
        raise ConfigError(f"{path}: expected a name that ends in .py and has no other dot; rename it")
    module = _imported(path)
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and issubclass(kind, Settings)
        and kind.__module__ == module.__name__
        and not inspect.isabstract(kind)
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ConfigError(
            f"{path}: expected one class derived from samestep.Settings, with a method build; found {names}"
        )
    check_class(found[0], str(path))
    return found[0]


def check_class(kind: type[Settings], where: str) -> None:
    """Check that a recipe's options can be parsed from the command line.

    Raises:
        ConfigError: the class is not decorated as a dataclass, or an option's type is not supported.
    """
    if "__dataclass_params__" not in vars(kind):
        raise ConfigError(
            f"{where}: class {kind.__name__}: put @dataclasses.dataclass(frozen=True) above it, which makes "
            "options of its fields"
        )
    what = "the type of a field"  # of which one, a name that is not defined does not tell
    try:
        for name, kind_of_field in kinds_of(kind).items():
            what = f"the type of {name}"
            describe(kind_of_field)
    except Exception as error:
        raise ConfigError(
            f"{where}: class {kind.__name__}: {what} cannot be used ({_described(error)}): expected bool, "
            "int, float, str, Path, a Literal of texts, or one of these | None"
        ) from error


def _imported(path: Path) -> ModuleType:
    """Import a file as a module of its own name, so that its classes can be pickled for loader processes."""
    folder, name = str(path.parent.resolve()), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec = find_spec(name)
        if spec is None or spec.origin is None or not path.samefile(spec.origin):
            raise ConfigError(f"{path}: its name is that of another module; rename it")
        _being_imported.append(path)
        return import_module(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}{_line_of(error, path)}: {_described(error)}") from error
    finally:
        _being_imported.clear()


def check_no_import(call: str) -> None:
    """Refuse a call at the top level of a recipe's file, which runs while the file is imported.

    Raises:
        ConfigError: a recipe's file is being imported.
    """
    if _being_imported:
        raise ConfigError(
            f"{_being_imported[0]}: it calls {call} on import, which would start workers of its own: "
            'expected the call under `if __name__ == "__main__":`'
        )


def _line_of(error: BaseException, path: Path) -> str:
    """Return ", line N" for the line of the file that raised the error."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f", line {error.lineno}"
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if Path(code.co_filename).name == path.name:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f", line {lines[-1]}" if lines else ""


def _described(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return one_line(f"{type(error).__name__}: {text}")
