"""Weights & Biases: the same run however often it is continued, and never a reason for training to end."""

import sys
import time
from types import SimpleNamespace

import pytest

import samestep

from .test_trainer import run


class Stub:
    """Their package, as far as it is used."""

    def __init__(self, failing=()):
        self.failing, self.inits, self.logged, self.config, self.ends = failing, [], [], {}, []
        self.Settings = dict

    def _do(self, name, action):
        if name in self.failing:
            raise RuntimeError(f"{name} failed")
        action()

    def init(self, **options):
        self._do("init", lambda: self.inits.append(options))
        return SimpleNamespace(
            config=SimpleNamespace(update=lambda values, allow_val_change: self.config.update(values)),
            log=lambda scalars, step: self._do("log", lambda: self.logged.append((step, scalars))),
            finish=lambda exit_code: self._do("finish", lambda: self.ends.append(exit_code)),
        )


@pytest.fixture
def stub(monkeypatch):
    stub = Stub()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_a_run_is_logged_and_goes_on_as_the_same(tmp_path, stub):
    run(tmp_path, 2, steps=15, max_seconds=1e-9, loggers=[samestep.WandB("mine")])
    run(tmp_path, 3, steps=15, loggers=[samestep.WandB("mine", tags=["a"])], must_match={})
    first, second = stub.inits
    assert first["id"] == second["id"] == (tmp_path / "wandb_id.txt").read_text().strip()
    assert (first["project"], first["resume"], second["tags"]) == ("mine", "allow", ["a"])
    assert [step for step, _ in stub.logged] == [5, 10, 15, 15]
    assert "loss/total" in stub.logged[0][1]
    assert stub.logged[-1][1].keys() == {"accuracy", "loss"}
    assert stub.config["towers"] == 7
    assert stub.config["workers"] == 3
    assert stub.config["batch_size"] == 10
    assert stub.ends == [1, 0]


@pytest.mark.long
def test_a_run_that_starts_over_is_another(tmp_path, stub):
    for fresh in (False, True):
        run(tmp_path, steps=1, fresh=fresh, loggers=[samestep.WandB("mine")])
    assert stub.inits[0]["id"] != stub.inits[1]["id"]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("content", ["", "../../x", "A B", "x" * 99])
def test_an_id_that_is_none_is_replaced(tmp_path, stub, content):
    (tmp_path / "wandb_id.txt").write_text(content)
    run(tmp_path, steps=1, loggers=[samestep.WandB("mine")])
    assert stub.inits[0]["id"] == (tmp_path / "wandb_id.txt").read_text().strip() != content


@pytest.mark.sampled(50)
@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_whatever_fails_there_training_goes_on(tmp_path, stub, capsys, failing):
    whole = run(tmp_path / "whole", steps=7)
    stub.failing = (failing,)
    assert run(tmp_path / "run", steps=7, loggers=[samestep.WandB("mine")]) == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"samestep: WandB failed (RuntimeError: {failing} failed); going on without it"


def test_without_the_package_training_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, steps=1, loggers=[samestep.WandB("mine")])
    told = (
        "samestep: WandB failed (wandb is not installed: pip install 'samestep[wandb]'); going on without it"
    )
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_package_itself_takes_it_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    whole = run(tmp_path / "whole", steps=15)
    for steps in (5, 15):
        result = run(tmp_path / "run", 2, steps=steps, loggers=[samestep.WandB("mine")])
    assert result == whole
    name = (tmp_path / "run" / "wandb_id.txt").read_text().strip()
    kept = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert kept
    end_s = time.monotonic() + 30  # another process writes them
    while not all(b"accuracy" in path.read_bytes() for path in kept):
        assert time.monotonic() < end_s
        time.sleep(0.1)
