"""metrics.jsonl: what is said of a run's starts, checkpoints and ends."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

import samestep
from samestep.app.lock import RunLock
from samestep.app.loggers.json_lines import JsonLines, read_lines
from samestep.summation.placement import Placement

from .test_trainer import run, trainer_of


def events(run_dir, *names):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") in names]


@pytest.mark.long
def test_an_end_says_why(tmp_path):
    run(tmp_path, 2, steps=2, max_seconds=1e-9)
    run(tmp_path, 2, steps=2)

    class Raising(samestep.Callback):
        def after_step(self, trainer, report):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        run(tmp_path, callbacks=[Raising()])
    reasons = [(line["step"], line["reason"]) for line in events(tmp_path, "end")]
    assert reasons == [(1, "--max-seconds"), (2, "done"), (3, "KeyError: 'mine'")]


@pytest.mark.long
def test_starts_and_ends_stay_when_their_steps_are_taken_again(tmp_path):
    class Raising(samestep.Callback):
        def after_step(self, trainer, report):
            if report.step == 7:
                raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path, callbacks=[Raising()], checkpoint_every=3, log_every=1)
    run(tmp_path, log_every=5)
    found = [(line["event"], line["step"]) for line in events(tmp_path, "start", "end")]
    assert found == [("start", 0), ("end", 8), ("start", 6), ("end", 15)]


@pytest.mark.long
def test_the_lines_of_an_earlier_run_are_on_the_disk_before_they_replace_its_file(tmp_path, monkeypatch):
    run(tmp_path, steps=2)
    calls = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append((path, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def noting_rename(name, to, **folders):
        calls.append((name, to))
        rename(name, to, **folders)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    run(tmp_path, steps=2)
    unfinished = ".metrics.jsonl.unfinished"
    at = calls.index((unfinished, "metrics.jsonl"))
    assert calls[at - 1] == (str(tmp_path / unfinished), size)
    assert calls[at + 1][0] == str(tmp_path)


@pytest.mark.long
def test_a_checkpoint_is_noted_at_its_own_step(tmp_path):
    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path, steps=7, checkpoint_every=3)
    trainer.run()
    noted = {line["name"]: line["step"] for line in events(tmp_path, "checkpoint")}
    assert noted["step-00000007"] == 7
    assert all(name == f"step-{step:08d}" for name, step in noted.items())


def test_where_towers_move_is_noted_once(tmp_path):
    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path, steps=4)
    with RunLock(tmp_path, trainer.job) as lock:
        lines = JsonLines(lock)
        lines.on_start(trainer)
        for step, cuts in enumerate([(0, 4), (0, 3, 4), (0, 3, 4), (0, 1, 4)]):
            towers = SimpleNamespace(placement=Placement(cuts))
            lines.after_step(SimpleNamespace(step=SimpleNamespace(towers=towers)), SimpleNamespace(step=step))
        lines.on_end(trainer)
    found = [(line["step"], line["towers"]) for line in events(tmp_path, "placement")]
    assert found[-2:] == [(2, [3, 1]), (4, [1, 3])]


@pytest.mark.long
def test_what_was_measured_after_a_step_is_there_once_though_a_run_begins_there_again(tmp_path):
    for _ in range(2):
        result = run(tmp_path, 2, steps=3, log_every=1)
    measured = [
        (line["step"], "step/seconds" in line) for line in read_lines(tmp_path) if "event" not in line
    ]
    assert measured == [(1, True), (2, True), (3, True), (3, False)]
    assert result.metrics  # it was measured again


def test_metrics_that_are_not_finite_or_have_our_names_damage_no_line(tmp_path):
    def measure(model, batch):
        return {
            "time": (torch.tensor(3.0), 1),
            "event": (1, 1),
            "nothing": (torch.tensor(1.0), 0),
            "a": (1, 2),
        }

    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path, steps=1)
    trainer.evaluate = samestep.Evaluation(trainer.evaluate.dataset, measure)
    trainer.run()
    (line,) = [line for line in read_lines(tmp_path) if "a" in line]
    assert line.keys() == {"step", "time", "evaluation/time", "evaluation/event", "a"}
    assert line["time"] > 1e9


@pytest.mark.parametrize(
    "line",
    [
        *(
            b'{"step": 1}',
            b'{"step": -1, "time": 1}',
            b'{"step": 1.5, "time": 1}',
            b'{"step": 1, "time": "1"}',
        ),
        *(b'{"step": 1, "time": NaN}', b'{"step": 1, "time": 1e300}', b'{"step": 1' + b"0" * 5000 + b"}"),
        *(b"[" * 100_000, b"\xff", b"\0", b"[]", b'{"step": 1, "step": 1, "time": 1}'),
    ],
)
def test_a_damaged_line_is_left_out(tmp_path, line):
    good = b'{"step": 1, "time": 1}'
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\n" + line + b"\n" + good)
    assert read_lines(tmp_path) == [{"step": 1, "time": 1}] * 2
