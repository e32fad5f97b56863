"""Summaries that cannot be written end no run; they are read back in tests/test_summaries.py."""

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep.app.evaluate_run import evaluate_run
from samestep.app.loggers import event_file
from samestep.app.loggers.event_file import EventFile
from samestep.app.loggers.tensorboard import TensorBoard, _scalar, write_metrics

from .runs import train
from .test_summaries import JOB, Tiny, hooks_of, scalars, take_steps


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The last lines of a run whose summaries are written."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(Tiny(run_dir=tmp_path_factory.mktemp("good"), steps=3, summary_every=2), JOB)
    return printed.getvalue().splitlines()[-2:]


def a_file(folder, monkeypatch):
    folder.write_text("mine")
    return "File exists"


def a_dangling_link(folder, monkeypatch):
    folder.symlink_to("nothing")
    return "File exists"


def a_link_to_itself(folder, monkeypatch):
    folder.symlink_to(folder.name)
    return "File exists"


def full_disk(folder, monkeypatch):
    monkeypatch.setattr(event_file, "_create", lambda folder: open("/dev/full", "wb"))  # noqa: SIM115
    return "No space left on device"


def read_only(folder, monkeypatch):
    def refused(self, *args, **options):
        if self.name.startswith("events.out"):
            raise OSError(30, "Read-only file system")
        return real_open(self, *args, **options)

    real_open = Path.open
    monkeypatch.setattr(Path, "open", refused)
    return "Read-only file system"


def a_bad_layer(folder, monkeypatch):
    monkeypatch.setattr("samestep.app.loggers.tensorboard.layers_of", lambda model: [][0])
    return "IndexError: list index out of range"


def a_bad_picture(folder, monkeypatch):
    monkeypatch.setattr("samestep.app.loggers.tensorboard._pictures", lambda batch: [][0])
    return "IndexError: list index out of range"


def a_bad_output(folder, monkeypatch):
    monkeypatch.setattr("samestep.app.loggers.activations.Output.of", lambda values: [][0])
    return "IndexError: list index out of range"


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        a_dangling_link,
        full_disk,
        a_bad_layer,
        a_bad_output,
        a_file,
        a_link_to_itself,
        read_only,
        a_bad_picture,
    ],
)
def test_a_run_goes_on_without_summaries(tmp_path, monkeypatch, capsys, fault, expected):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    reason = fault(run_dir / "summaries", monkeypatch)
    assert train(Tiny(run_dir=run_dir, steps=3, summary_every=2), JOB) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-2:] == expected
    lines = printed.err.splitlines()
    assert lines[0] == (
        f"samestep: {run_dir}/summaries: summaries cannot be written ({reason}); going on without them"
    )
    assert all(line.startswith(f"samestep: {run_dir}/summaries/evaluation: ") for line in lines[1:])
    assert len(lines) <= 2


@pytest.mark.sampled
@pytest.mark.parametrize("action", ["delete", "delete all", "move"])
def test_a_folder_that_goes_away_in_the_middle(tmp_path, capsys, action):
    experiment = Tiny().build(JOB)
    run_dir, moved = tmp_path / "run", tmp_path / "moved"
    run_dir.mkdir()

    def strike(step):
        if step == 1 and action == "move":
            run_dir.rename(moved)
        elif step == 1:
            shutil.rmtree(run_dir if action == "delete all" else run_dir / "summaries")

    take_steps(run_dir, experiment, 4, every=1, between=strike)
    assert run_dir.exists() == (action == "delete")
    if action == "move":
        assert list(scalars(moved / "summaries", "loss/total")) == [1, 2, 3, 4]
    lost = (
        f"samestep: {run_dir}/summaries: summaries cannot be written (FileNotFoundError: the file was "
        "deleted); going on without them\n"
    )
    assert capsys.readouterr().err == ("" if action == "move" else lost)


def test_nothing_is_recorded_once_it_cannot_be_written(tmp_path):
    trainer = Tiny(run_dir=tmp_path).build(JOB)
    (tmp_path / "summaries").touch()
    logger = TensorBoard(every=1)
    logger.on_start(trainer)
    logger.before_step(trainer, None)
    assert hooks_of(trainer.model) == []
    trainer.run_dir = tmp_path / "other"
    TensorBoard(every=1).on_start(trainer)
    assert not trainer.run_dir.exists()  # nor is a run's folder made that is not there


def test_an_error_of_the_step_itself_is_raised(tmp_path):
    trainer = Tiny().build(JOB)

    def fail(model, batch):
        raise RuntimeError(f"of {len(hooks_of(model))} hooks")

    trainer.step.loss_fn = fail
    with pytest.raises(RuntimeError, match="of 3 hooks"):
        take_steps(tmp_path, trainer, 1, every=1)
    assert hooks_of(trainer.model) == []


@pytest.mark.long
def test_evaluation_prints_first_and_says_once_what_it_cannot_write(tmp_path, capsys, monkeypatch):
    settings = Tiny(run_dir=tmp_path, steps=1)
    train(settings, JOB)
    shutil.rmtree(tmp_path / "summaries")
    (tmp_path / "summaries").touch()
    capsys.readouterr()
    said = []
    monkeypatch.setattr(event_file.sys, "stderr", SimpleNamespace(write=said.append, flush=lambda: None))
    for _ in range(3):
        evaluate_run(settings, JOB)
        assert "test accuracy" in capsys.readouterr().out
        said.append("next")
    text = "".join(said)
    assert text.count("cannot be written (Not a directory)") == 1
    assert text.index("cannot") < text.index("next")


def test_names_that_are_no_text_and_files_of_the_same_second(tmp_path):
    run_dir = tmp_path / "run \udcff\x1b[2J"
    run_dir.mkdir()
    write_metrics(run_dir, 4, {"precision @ 1": 0.5})
    write_metrics(run_dir, 8, {"precision @ 1": 0.75})
    assert len(list((run_dir / "summaries" / "evaluation").iterdir())) == 2


def test_a_step_is_whole_or_not_there(tmp_path):
    file = EventFile(tmp_path)
    file.write(1, (_scalar("loss", value) for value in (1.0,)))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    file.write(2, (_scalar("loss", value) for value in (1.0, torch.zeros(3))))  # no scalar
    assert not file.is_open
    file.write(3, iter([]))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size
    assert list(scalars(tmp_path, "loss")) == [1]
