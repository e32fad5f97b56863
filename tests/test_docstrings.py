"""The examples in the package's docstrings do what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import samestep

PACKAGE = Path(samestep.__file__).parent


def with_examples():
    """Return the names of modules that have examples."""
    files = [each for each in sorted(PACKAGE.rglob("*.py")) if ">>> " in each.read_text("utf-8")]
    return [".".join(each.relative_to(PACKAGE.parent).with_suffix("").parts) for each in files]


@pytest.mark.parametrize("name", with_examples())
def test_examples_do_what_they_show(name):
    try:
        module = importlib.import_module(name.removesuffix(".__init__"))
    except ImportError as error:
        pytest.skip(str(error))  # of a package that not everybody has
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
