"""`samestep doctor` as users run it, and what it says of a net that does not keep the promise."""

import pytest

from samestep.app.doctor import report

pytestmark = pytest.mark.long

RECIPE = """
import time
from dataclasses import dataclass
import torch
from samestep import Settings, Step, TowerLoader, Towers

@dataclass(frozen=True)
class Placed(Settings):
    def build(self, job):
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        towers = Towers(model, self.towers, job=job)
        scale = 1 + (job.world_size == 2) / 8
        loss = lambda model, x: time.sleep(0.01) or (model(x).square() * scale).mean()
        step = Step(towers, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        return self.trainer(step, TowerLoader(torch.ones(200, 1), self.batch_size, towers), loggers=())
"""


@pytest.mark.timeout(450)  # two minutes, and twice as long on a machine that does much else
def test_everything_holds(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    finished = run("doctor", "--device", "cpu")
    lines = finished.stdout().splitlines()
    assert lines[-1] == "everything holds", lines
    assert not [line for line in lines if "not measured" in line or "FAILED" in line]
    assert finished.stderr() == ""


@pytest.mark.gpu
def test_everything_holds_on_gpus(run):
    lines = run("doctor", "--device", "cuda").stdout().splitlines()
    assert lines[-1] == "everything holds", lines
    assert any("the host waits" in line for line in lines)


@pytest.mark.slow
def test_weights_that_depend_on_the_placement(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "Measurements", lambda *_: ())
    recipe = tmp_path / "placed.py"
    recipe.write_text(RECIPE)
    assert report.examine("cpu", recipe=[str(recipe)]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "does not hold: 7 towers on 2 workers; 2 workers, all killed, resumed on 1"
