import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from samestep.app.settings import Settings, read_settings
from samestep.errors import ConfigError, DataError, MissingFileError
from samestep.recipes import RECIPES
from samestep.recipes.digits.recipe import DigitsSettings


def write(folder, **changed):
    """Write a run's settings with other values."""
    DigitsSettings(run_dir=folder).write()
    path = folder / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return path


def test_settings_come_back_as_they_were_written(tmp_path):
    settings = DigitsSettings(run_dir=tmp_path, towers=7, workers=3, learning_rate=0.5, optimizer="adamw")
    settings.write()
    assert read_settings(tmp_path, RECIPES) == settings


def test_paths_that_are_no_text_come_back_too(tmp_path):
    settings = RECIPES["cifar10"](run_dir=tmp_path, data_dir=Path("\udcff"))
    settings.write()
    assert read_settings(tmp_path, RECIPES) == settings


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("towers", "eight", "an integer from 1 to 65536"),
        ("towers", None, "an integer from 1 to 65536"),
        ("towers", True, "an integer from 1 to 65536"),
        ("towers", 2**31, "an integer from 1 to 65536"),
        ("workers", "5", "an integer from 1 to 1024 or auto"),
        ("fresh", 1, "true or false"),
        ("learning_rate", "x", "a number above 0 and up to 1000000"),
        ("learning_rate", -1, "a number above 0 and up to 1000000"),
        ("timeout", 10**400, "a number above 0 and up to 1000000"),
        ("run_dir", 3, "a path"),
        ("run_dir", "\ud800", "a path"),
        ("optimizer", [], "one of sgd, adamw"),
        ("autocast", "banana", "one of none, bf16, fp16"),
        ("device", "\x1b[2J" * 1000, "one of auto, cpu, cuda"),
        ("device", "x" * 500_000, "one of auto, cpu, cuda"),
        ("recipe", [], "one of digits, cifar10, segmentation, lm"),
        ("recipe", "other", "one of digits, cifar10, segmentation, lm"),
        ("recipe", {"a": [[[[]]]]}, "one of digits, cifar10, segmentation, lm"),
    ],
)
def test_values_that_no_option_takes_are_named(tmp_path, name, value, expected):
    path = write(tmp_path, **{name: value})
    with pytest.raises(DataError) as raised:
        read_settings(tmp_path, RECIPES)
    said = str(raised.value)
    assert said.startswith(f"{path}: {name} = ")
    assert said.endswith(f", expected {expected}; restore it or start over")
    assert said.isprintable()
    assert len(said) < len(str(path)) + 200


def test_values_that_do_not_go_together_are_the_files_fault(tmp_path):
    path = write(tmp_path, recipe="segmentation", classes=7)
    with pytest.raises(DataError, match=f"^{path}: --classes 7: the shapes that are drawn"):
        read_settings(tmp_path, RECIPES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a JSON object"),
        ("{", "as JSON"),
        ("{}", "recipe = None, expected one of"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        (" " * (1 << 20) + "{}", "expected at most 1048576 bytes"),
    ],
)
def test_files_that_hold_no_settings(tmp_path, text, message):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_settings(tmp_path, RECIPES)


def test_no_settings(tmp_path):
    with pytest.raises(MissingFileError, match="expected a run folder"):
        read_settings(tmp_path, RECIPES)
    with pytest.raises(MissingFileError, match="expected a run folder"):
        read_settings(tmp_path / ("x" * 300), RECIPES)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_would_never_end_is_not_read(tmp_path, make):
    make(tmp_path / "settings.json")
    with pytest.raises(DataError, match="not a file, expected JSON"):
        read_settings(tmp_path, RECIPES)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"learning_rate": 0.1}, "learning_rate = 0.1, not 0.2"),
        ({"learning_rate": "\x1b[2J" * 99}, "learning_rate = "),
        ({"recipe": []}, r"recipe = \[\], not digits"),
        ({"seed": [[[[[[[["x" * 999]]]]]]]]}, r"seed = \[\[\[\[\[\[\[\.\.\.\]\]\]\]\]\]\], not 0"),
        ({"optimizer": "adamw"}, "optimizer = adamw, not sgd"),
    ],
)
def test_another_experiment_is_not_continued(tmp_path, changed, said):
    write(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"was trained with {said}") as raised:
        DigitsSettings(run_dir=tmp_path).check_same_experiment()
    assert str(raised.value).isprintable()


def test_another_recipe_is_said_before_the_options_in_which_it_differs(tmp_path):
    RECIPES["cifar10"](run_dir=tmp_path).write()
    with pytest.raises(ConfigError, match="was trained with recipe = cifar10, not digits"):
        DigitsSettings(run_dir=tmp_path, batch_size=7).check_same_experiment()


def test_an_option_that_the_file_lacks_had_its_default(tmp_path):
    path = write(tmp_path)
    values = json.loads(path.read_text())
    del values["learning_rate"]
    path.write_text(json.dumps(values))
    DigitsSettings(run_dir=tmp_path).check_same_experiment()
    with pytest.raises(ConfigError, match=r"learning_rate = 0\.2, not 0\.3"):
        replace(DigitsSettings(run_dir=tmp_path), learning_rate=0.3).check_same_experiment()


def test_where_and_how_a_run_goes_on_is_free(tmp_path):
    write(tmp_path, threads=4, timeout=5.0, run_dir="/elsewhere")
    DigitsSettings(run_dir=tmp_path).check_same_experiment()


@dataclass(frozen=True)
class Tabled(Settings):
    table: Path = Path("a.csv")

    def build(self, job):
        raise NotImplementedError


def test_a_recipes_own_path_may_stay_the_same(tmp_path):
    settings = Tabled(run_dir=tmp_path)
    settings.write()
    settings.check_same_experiment()
    settings.check_same(settings.must_match())
    with pytest.raises(ConfigError, match=r"was trained with table = a\.csv, not b\.csv"):
        replace(settings, table=Path("b.csv")).check_same_experiment()
    with pytest.raises(ConfigError, match=r"was trained with table = a\.csv, not b\.csv"):
        replace(settings, table=Path("b.csv")).check_same(settings.must_match())
