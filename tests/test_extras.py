"""Without the packages of the extras: what can do without them does, the rest says what to install."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import samestep
from samestep import Job
from samestep.app.extras import extra
from samestep.app.loggers.tensorboard import write_metrics
from samestep.errors import ConfigError
from samestep.recipes.cifar10.download import Archive, fetch
from samestep.recipes.digits.settings import DigitsSettings
from samestep.recipes.segmentation.settings import SegmentationSettings

from .runs import train

ROOT = Path(__file__).parents[1]
ALONE = Job(torch.device("cpu"))


@pytest.fixture
def without(monkeypatch):
    """Hide packages, and forget modules of ours that have imported them."""

    def hide(*packages, forget=()):
        for name in list(sys.modules):
            if name.partition(".")[0] in packages or name in forget:
                monkeypatch.delitem(sys.modules, name)
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.long
def test_digits_train_with_the_core_alone(tmp_path, without, capfd):
    without("PIL", "requests", "rich", "tensorboard")
    assert train(DigitsSettings(steps=2, batch_size=16, log_every=1, run_dir=tmp_path / "run"), ALONE) == 0
    printed = capfd.readouterr()
    assert printed.err == (
        "samestep: no summaries are written: tensorboard is not installed: "
        "pip install 'samestep[tensorboard]'\n"
    )
    assert "test accuracy" in printed.out
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "summaries").exists()


def test_segmentation_draws_its_shapes_with_the_core_alone(tmp_path, without):
    without("PIL", "tensorboard", forget=("samestep.recipes.segmentation.label_maps",))
    settings = SegmentationSettings(data_dir=None, width=1, run_dir=tmp_path)
    assert settings.build(ALONE).loggers == []


def test_tensorboard_says_what_it_lacks(without):
    without("tensorboard")
    with pytest.raises(ConfigError, match=r"^tensorboard is not installed: pip install"):
        samestep.TensorBoard()


def test_an_evaluation_without_tensorboard_is_one_line(tmp_path, without, capfd):
    without("tensorboard")
    write_metrics(tmp_path, 1, {"accuracy": 0.5})
    (line,) = capfd.readouterr().err.splitlines()
    assert "tensorboard is not installed: pip install 'samestep[tensorboard]'" in line


def test_folders_of_pictures_want_pillow(tmp_path, without):
    without("PIL", forget=("samestep.recipes.segmentation.label_maps",))
    with pytest.raises(ConfigError, match=r"^PIL is not installed: pip install 'samestep\[segmentation\]'$"):
        SegmentationSettings(data_dir=tmp_path).build(ALONE)


def test_a_download_wants_requests(tmp_path, without):
    without("requests")
    archive = Archive("http://localhost/pictures.tar.gz", "0", "pictures")
    with pytest.raises(ConfigError) as caught:
        fetch(archive, tmp_path)
    assert str(caught.value) == (
        "http://localhost/pictures.tar.gz: requests is not installed: pip install 'samestep[cifar10]'; run "
        f"again, or download http://localhost/pictures.tar.gz yourself and unpack it into {tmp_path}"
    )


def test_a_module_of_ours_that_is_missing_is_no_extra():
    with pytest.raises(ModuleNotFoundError, match=r"samestep\.nowhere"), extra("train"):
        import samestep.nowhere  # noqa: F401


def test_the_extras_that_are_named_exist():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = {*re.findall(r"\bextra\(\"(\w+)\"\)", sources), *re.findall(r"samestep\[(\w+)\]", sources)}
    assert {"tensorboard", "cifar10", "segmentation"} <= named <= declared.keys()
