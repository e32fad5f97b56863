import math
import re
from types import SimpleNamespace

import pytest
import torch

from samestep.app.display import Display, _console
from samestep.recipes.digits.recipe import DigitsSettings
from samestep.summation.placement import Placement
from samestep.workers.job import Job

from .runs import train

JOB = Job(torch.device("cpu"))
LINE = (
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: step (\d+), loss = \d+\.\d+ "
    r"\(\d+\.\d rows/sec; \d+\.\d{3} sec/batch; \d+\.\d\d of \d+\.\d GiB\)"
)


def tiny(run_dir, **options):
    return DigitsSettings(run_dir=run_dir, towers=4, batch_size=8, device="cpu", **options)


def test_lines_show_date_step_loss_and_speed(tmp_path, capsys):
    train(tiny(tmp_path, steps=8, log_every=3, log_device_placement=True), JOB)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"worker 0 on \S+, cpu, 1 threads: towers 0, 1, 2, 3", lines[0])
    assert [re.fullmatch(LINE, line)[1] for line in lines[2:5]] == ["3", "6", "8"]
    assert lines[5].startswith("test accuracy = 0.")


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (
            {"noise": 2345.6, "num_measured": 10},
            "noise scale 2,300 rows: batches up to about that size pay off",
        ),
        ({"noise": 2345.6, "num_measured": 9}, None),  # too few to act on
        ({"noise": math.inf, "num_measured": 10}, None),
    ],
)
def test_the_noise_scale_is_printed_where_it_has_changed(tmp_path, capsys, noise, expected):
    trainer = tiny(tmp_path, steps=5).build(JOB)
    towers = trainer.step.towers
    display = Display()
    display.on_start(trainer)
    capsys.readouterr()
    scalars = {
        "loss/total": 1e-7,
        "step/rows per second": 1.0,
        "step/seconds": 1.0,
        "step/peak memory, GiB": 1.0,
    }
    for factor in (1, 1.2, 0.9, 2):
        towers.noise.load_state_dict({"signal": 1.0, **noise, "noise": noise["noise"] * factor})
        display.log(1, scalars)
        out = capsys.readouterr().out
        assert "loss = 1.000e-07 " in out
        lines = [line for line in out.splitlines() if "noise" in line]
        if factor == 2 and expected:
            lines = [line.replace("4,700", "2,300") for line in lines]
        assert lines == ([expected] if expected and factor in (1, 2) else [])
    display.on_end(trainer)


def test_a_line_says_where_towers_have_moved(tmp_path, capsys):
    trainer, display = tiny(tmp_path, steps=5).build(JOB), Display()
    display.on_start(trainer)
    capsys.readouterr()
    towers = SimpleNamespace(placement=Placement((0, 3, 4)))
    for step in (6, 7):
        display.after_step(SimpleNamespace(step=SimpleNamespace(towers=towers)), SimpleNamespace(step=step))
    assert capsys.readouterr().out == "placement: the workers run 3 + 1 towers from step 7 on\n"
    display.on_end(trainer)


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("value", ["0", "1", "-1", "²", "", "9" * 30])
def test_whatever_the_environment_says_of_the_terminal_there_is_room(monkeypatch, capsys, name, value):
    with monkeypatch.context() as environment:  # pytest, too, reads it, to report the end of a test
        environment.setenv(name, value)
        console = _console()
        assert min(console.size) > 0
        console.print("step 1", soft_wrap=True)
    assert capsys.readouterr().out == "step 1\n"
