"""A layer imports only from those below it, as ARCHITECTURE.md draws them."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.sampled(5)

SOURCE = Path(__file__).parents[1] / "src" / "samestep"
LAYERS = (
    *("cli", "recipes", "integrations", "app", "checking", "checkpoint", "data", "sharding", "towers"),
    *("watching", "batches", "buffers", "summation", "workers", "memory"),
    *("identity", "streams", "forks", "arguments", "errors"),
)
WATCHING = ("watch", "passes", "losses", "operators", "model", "program")
FILES = [path for path in SOURCE.rglob("*.py") if path.name not in ("__main__.py",)]


def layer_of(module):
    """Return the place in `LAYERS` of a module of ours; None for other packages, and for samestep itself."""
    package, _, rest = module.partition(".")
    return LAYERS.index(rest.partition(".")[0]) if package == "samestep" and rest else None


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards_only(path):
    place = path.relative_to(SOURCE).with_suffix("").parts[0]
    if place == "__init__":
        return
    above = [m for m in imported(path) if (r := layer_of(m)) is not None and r < LAYERS.index(place)]
    assert not above


@pytest.mark.parametrize("room", WATCHING[1:])
def test_rooms_of_the_watch_import_downwards_only(room):
    modules = {module for path in (SOURCE / "watching" / room).glob("*.py") for module in imported(path)}
    parts = {module.split(".")[2] for module in modules if module.startswith("samestep.watching.")}
    assert parts <= set(WATCHING[WATCHING.index(room) :])
