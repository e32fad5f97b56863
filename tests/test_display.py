import math
import re

import pytest
import torch

from samestep.app.display import Display, _console
from samestep.app.training import train
from samestep.recipes.digits.recipe import DigitsSettings
from samestep.towers.report import Report
from samestep.workers.job import Job

JOB = Job(torch.device("cpu"))
LINE = (
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: step (\d+), loss = \d+\.\d\d \(\d+\.\d rows/sec; \d+\.\d{3} sec/batch\)"
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
def test_the_noise_scale_is_printed_with_the_summaries_and_at_the_end(tmp_path, capsys, noise, expected):
    settings = tiny(tmp_path, steps=5, log_every=99, summary_every=2)
    towers = settings.build(JOB).step.towers
    towers.noise.load_state_dict({"signal": 1.0, **noise})
    display = Display(settings, JOB, towers)
    capsys.readouterr()
    zero = torch.zeros(4, 1, dtype=torch.float64)
    for step in range(5):
        display.show(Report(step, 8, zero, zero, []))
        lines = [line for line in capsys.readouterr().out.splitlines() if "noise" in line]
        assert lines == ([expected] if expected and step + 1 in (2, 4, 5) else [])


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("value", ["0", "1", "-1", "²", "", "9" * 30])
def test_whatever_the_environment_says_of_the_terminal_there_is_room(monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    console = _console()
    assert min(console.size) > 0
    console.print("step 1", soft_wrap=True)
    assert capsys.readouterr().out == "step 1\n"
