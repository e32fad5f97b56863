"""Code that a test writes: in a file, because samestep reads the source code of what runs."""

import importlib.util
from pathlib import Path
from types import ModuleType


def imported(code: str, path: Path) -> ModuleType:
    """Write code to a new file, and return it as a module."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
