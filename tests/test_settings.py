import json
import os

import pytest

from samestep.app.settings import read_settings
from samestep.errors import DataError, MissingFileError
from samestep.recipes import RECIPES
from samestep.recipes.digits.recipe import DigitsSettings


def test_settings_come_back_as_they_were_written(tmp_path):
    settings = DigitsSettings(run_dir=tmp_path, towers=7, workers=3, learning_rate=0.5, optimizer="adamw")
    settings.write()
    assert read_settings(tmp_path, RECIPES) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("towers", "eight"),
        ("towers", None),
        ("fresh", 1),
        ("learning_rate", "x"),
        ("run_dir", 3),
        ("optimizer", []),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, name, value):
    DigitsSettings(run_dir=tmp_path).write()
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DataError, match=rf"settings\.json: {name} = "):
        read_settings(tmp_path, RECIPES)


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "a JSON object"), ("{", "as JSON"), ("{}", "recipe = None, expected one of")]
)
def test_files_that_hold_no_settings(tmp_path, text, message):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_settings(tmp_path, RECIPES)


def test_no_settings(tmp_path):
    with pytest.raises(MissingFileError, match="expected a run folder"):
        read_settings(tmp_path, RECIPES)


def test_what_would_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(DataError, match="not a file, expected JSON"):
        read_settings(tmp_path, RECIPES)
