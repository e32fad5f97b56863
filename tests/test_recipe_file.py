"""Recipes of other people: in a file, and in a package that declares them as entry points."""

import json
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from samestep import cli, recipes

EXAMPLE = Path(__file__).parents[1] / "examples" / "recipe.py"
QUICK = ["--steps", "3", "--batch-size", "10", "--towers", "3", "--workers", "1"]


@pytest.fixture
def recipe(tmp_path):
    """A copy of the example, under a name of its own."""
    path = tmp_path / "my_recipe_file.py"
    shutil.copy(EXAMPLE, path)
    yield path
    forget(path)


def forget(path):
    sys.modules.pop(path.stem, None)
    if str(path.parent) in sys.path:
        sys.path.remove(str(path.parent))


def run(capsys, *words):
    capsys.readouterr()
    status = cli.main([str(word) for word in words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_file_works_with_every_command(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    status, out, err = run(capsys, "train", recipe, "--width", 8, "--run-dir", run_dir, *QUICK)
    assert (status, err) == (0, "")
    digest = out.split()[-1]
    assert json.loads((run_dir / "settings.json").read_text())["recipe"] == "my_recipe_file.py"
    assert run(capsys, "digest", run_dir) == (0, f"{digest}\n", "")
    status, out, err = run(capsys, "eval", run_dir, "--recipe", recipe, "--workers", 1)
    assert (status, err) == (0, "")
    assert ": step 3: accuracy = " in out
    status, out, _ = run(capsys, "train", recipe, "--help")
    assert (status, "Hidden units. (default: 256)" in out) == (0, True)
    status, _, err = run(capsys, "train", recipe, "--width", 9, "--run-dir", run_dir, *QUICK)
    assert (status, "was trained with width = 8, not 9" in err) == (2, True)


def test_a_run_folder_does_not_say_which_code_is_run(recipe, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run(capsys, "train", recipe, "--run-dir", run_dir, *QUICK)
    forget(recipe)
    for name in ("my_recipe_file.py", str(recipe)):
        settings = json.loads((run_dir / "settings.json").read_text())
        (run_dir / "settings.json").write_text(json.dumps({**settings, "recipe": name}))
        status, out, err = run(capsys, "eval", run_dir, "--workers", 1)
        assert (status, out) == (2, "")
        assert err.endswith(" is a file: give its path with --recipe\n")
        assert recipe.stem not in sys.modules


@pytest.mark.parametrize(
    ("other", "remedy"),
    [("digits", "leave out --recipe"), ("b.py", "give the path of that file with --recipe")],
)
def test_a_run_of_another_recipe_than_the_file_s_is_no_reason_to_start_over(
    recipe, tmp_path, capsys, other, remedy
):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"recipe": other}))
    status, out, err = run(capsys, "eval", tmp_path, "--recipe", recipe, "--workers", 1)
    assert (status, out) == (2, "")
    assert err == f"samestep: error: {path}: recipe = '{other}', not 'my_recipe_file.py': {remedy}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", ", line 1: SyntaxError: '(' was never closed"),
        ("\nimport nothing_of_the_kind", ", line 2: ModuleNotFoundError: No module named"),
        (
            "def f():\n    return [][0]\nf()",
            ", line 2: IndexError: list index out of range",
        ),
        ("x = 1", ": expected one class derived from samestep.Settings, with a method build; found none"),
        (
            "import samestep\nclass A(samestep.Settings):\n    width: int = 3\n    build = 1",
            ": class A: put @dataclasses.dataclass(frozen=True) above it, which makes options of its fields",
        ),
        *(
            (
                "import dataclasses, samestep\n@dataclasses.dataclass(frozen=True)\n"
                f"class A(samestep.Settings):\n    width: '{kind}' = None\n    build = 1",
                ": class A: the type of width cannot be used (",
            )
            for kind in ("list[int]", "int | dict")
        ),
        (
            "import dataclasses, samestep\n@dataclasses.dataclass(frozen=True)\n"
            "class A(samestep.Settings):\n    depth: int = 3\n    width: 'Width' = 3\n    build = 1",
            ": class A: the type of a field cannot be used (NameError: name 'Width' is not defined)",
        ),
        (
            "import samestep\nclass A(samestep.Settings):\n    build = 1\nclass B(A): pass",
            ": expected one class derived from samestep.Settings, with a method build; found A, B",
        ),
        ("import sys\nsys.exit(0)", ", line 2: SystemExit: 0"),
        ("x = 1\0", ": SyntaxError: source code string cannot contain null bytes"),
        (
            "import samestep\nsamestep.launch(print, 2)",
            ": it calls samestep.launch on import, which would start workers of its own: expected",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "my_broken_file.py"
    path.write_text(text)
    status, out, err = run(capsys, "train", path)
    forget(path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"samestep: error: {path}{message}")


def test_a_file_that_is_not_there_or_has_the_name_of_a_module_is_refused(tmp_path, capsys):
    status, _, err = run(capsys, "check", tmp_path / "mine.py")
    assert (status, err) == (
        2,
        f"samestep: error: {tmp_path}/mine.py: not found; expected a Python file with a recipe\n",
    )
    shutil.copy(EXAMPLE, tmp_path / "json.py")
    status, _, err = run(capsys, "train", tmp_path / "json.py")
    forget(tmp_path / "nothing")
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]
    assert (status, err) == (
        2,
        f"samestep: error: {tmp_path}/json.py: its name is that of another module; rename it\n",
    )


@pytest.mark.parametrize("name", ["v1.2.py", "mine.txt"])
def test_a_file_that_cannot_be_imported_by_its_name_is_refused(tmp_path, capsys, name):
    path = tmp_path / name
    shutil.copy(EXAMPLE, path)
    status, _, err = run(capsys, "eval", tmp_path, "--recipe", path)
    line = f"samestep: error: {path}: expected a name that ends in .py and has no other dot; rename it\n"
    assert (status, err) == (2, line)


def test_a_recipe_that_builds_nothing_is_named_by_every_command(recipe, tmp_path, capsys):
    recipe.write_text(recipe.read_text().replace("return self.trainer(", "self.trainer("))
    message = "samestep: error: my_recipe_file.py: build returned None: expected `return self.trainer("
    for command in ("train", "check"):
        status, _, err = run(capsys, command, recipe, "--run-dir", tmp_path / "run", *QUICK)
        assert (status, err.startswith(message)) == (2, True)


# ---- entry points --------------------------------------------------------------------------------------


@pytest.fixture
def declared(monkeypatch):
    def declare(**points):
        found = [EntryPoint(name, value, "samestep.recipes") for name, value in points.items()]
        monkeypatch.setattr(recipes, "entry_points", lambda group: found)
        recipes._entry_points.cache_clear()

    yield declare
    recipes._entry_points.cache_clear()


def test_a_package_adds_its_recipes(declared, tmp_path, capsys):
    declared(tiny="tests.test_resume:Tiny")
    assert [*recipes.RECIPES][-1] == "tiny"
    run_dir = tmp_path / "run"
    status, _, _ = run(capsys, "train", "tiny", "--run-dir", run_dir, "--steps", 1, "--workers", 1)
    assert status == 0
    assert run(capsys, "eval", run_dir, "--workers", 1)[0] == 0
    assert "tiny" in run(capsys, "train", "--help")[1]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"other": "tests.test_resume:Tiny"}, "has recipe = 'tiny', expected 'other'"),
        ({"other": "tests.nothing:Tiny"}, "cannot be imported (ModuleNotFoundError: No module named"),
    ],
)
def test_a_package_that_is_broken_is_named(declared, capsys, point, message):
    declared(**point)
    status, _, err = run(capsys, "train", "other")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
