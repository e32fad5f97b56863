import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from samestep import cli
from samestep.app.bounds import Range, describe, fits, from_json, from_word, kinds_of
from samestep.app.settings import Settings
from samestep.errors import ConfigError
from samestep.recipes import RECIPES

Few = Annotated[int, Range(1, 9)]
Share = Annotated[float, Range(0, 1, is_open=True)]
MANY = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("kind", "words", "values"),
    [
        (Few, ("1", "9", " 5"), (1, 9, 5)),
        (Few | Literal["auto"], ("3", "auto"), (3, "auto")),
        (Share | None, ("1e-320", "1"), (1e-320, 1.0)),
        (float, ("-2.5", "1e308"), (-2.5, 1e308)),
        (Path | None, ("a", "~", "\udcff"), (Path("a"), Path("~"), Path("\udcff"))),
        (str, ("x",), ("x",)),
        (bool | None, ("true", "false"), (True, False)),
    ],
)
def test_words_become_values(kind, words, values):
    found = tuple(from_word(kind, word) for word in words)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]
    assert all(fits(kind, value) for value in values)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Few, ("0", "10", "-1", "1.5", "", " ", "nan", "1e3", MANY, "auto")),
        (Few | Literal["auto"], ("0", "Auto", "")),
        (Share, ("0", "-0.0", "-1", "1.1", "nan", "inf", "-inf", "x", "")),
        (float, ("nan", "inf", "1e309", "")),
        (Path, ("", "a\0b", "\ud800")),
        (Literal["a", "b"], ("c", "")),
        (bool | None, ("1", "True", "no", "")),
    ],
)
def test_other_words_do_not(kind, words):
    for word in words:
        with pytest.raises(ValueError, match="expected "):
            from_word(kind, word)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Few, (1, 9), (0, 10, 1.0, True, "1", None, [], 10**400, math.nan)),
        (Few | Literal["auto"], (1, "auto"), ("1", "x", [], None)),
        (Share | None, (1, 0.5, None), (0, 2, 10**400, math.inf, math.nan, True, "0.5", {})),
        (bool, (True, False), (0, 1, "true", None)),
        (Path | None, ("a", None), ("", "a\0b", "\ud800", 3, [])),
        (Literal["a", "b"], ("a",), ("c", "", 1, ["a"], None)),
    ],
)
def test_values_of_settings_json(kind, good, bad):
    for value in good:
        assert from_json(kind, value) == (
            Path(value) if isinstance(value, str) and kind == Path | None else value
        )
    for value in bad:
        with pytest.raises(ValueError, match="expected "):
            from_json(kind, value)


def test_what_is_expected_is_said_in_words():
    assert describe(Few | Literal["auto"]) == "an integer from 1 to 9 or auto"
    assert describe(Share | None) == "a number above 0 and up to 1"
    assert describe(Literal["a", "b"]) == "one of a, b"
    assert describe(Path | None) == "a path"


def test_a_field_that_is_declared_again_keeps_its_bounds():
    @dataclass(frozen=True)
    class Base:
        rows: Few = 1
        share: Share | None = None

    @dataclass(frozen=True)
    class Same(Base):
        rows: int = 2
        share: float | None = 0.5

    @dataclass(frozen=True)
    class Other(Same):
        rows: Annotated[int, Range(5, 6)] = 5

    assert kinds_of(Same) == kinds_of(Base) == {"rows": Few, "share": Share | None}
    assert kinds_of(Other) == {"rows": Annotated[int, Range(5, 6)], "share": Share | None}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_a_recipe_has_bounds_and_its_default_is_inside(recipe):
    kinds = kinds_of(RECIPES[recipe])
    assert {name for name, kind in kinds.items() if fits(kind, 10**15) or fits(kind, -(10**20))} <= {"seed"}
    assert all(fits(kinds[field.name], field.default) for field in dataclasses.fields(RECIPES[recipe]))


@pytest.mark.parametrize("command", ["train digits", "check digits", "eval runs/nothing"])
@pytest.mark.parametrize("threads", ["0", "-1", "100000", "1e3", MANY])
def test_numbers_are_refused_before_anything_is_made(command, threads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split(), "--threads", threads]) == 2
    error = capsys.readouterr().err
    assert error.startswith("samestep: error: argument --threads: invalid value '")
    assert "expected an integer from 1 to 1024; see samestep" in error
    assert len(error) < 300
    assert list(tmp_path.iterdir()) == []


def test_python_callers_hear_the_same():
    kind = type(RECIPES["digits"]())
    assert issubclass(kind, Settings)
    for changed, message in (
        ({"towers": 2**31}, "--towers 2147483648: expected an integer from 1 to 65536"),
        ({"timeout": math.nan}, "--timeout nan: expected a number above 0 and up to 1000000"),
        ({"autocast": "banana\x1b[2J"}, r"--autocast banana\x1b[2J: expected one of none, bf16, fp16"),
        ({"run_dir": Path("a\0b")}, r"--run-dir a\x00b: expected a path"),
        ({"device": "x" * 5_000_000}, f"--device {'x' * 80}: expected one of auto, cpu, cuda"),
        ({"learning_rate": "0.1"}, "--learning-rate 0.1: expected a number above 0 and up to 1000000"),
    ):
        with pytest.raises(ConfigError) as raised:
            kind(**changed)
        assert str(raised.value) == message
