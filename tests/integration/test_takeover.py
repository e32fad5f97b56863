"""A launcher's workers, of which some are killed or stopped: the others go on, and newcomers join."""

import os
import random
import re
import signal

import pytest

from samestep.app.loggers.json_lines import read_lines

from . import sent_away
from .takeover import Soak

STEPS = 150


@pytest.fixture
def soak(nursery, tmp_path):
    return Soak(nursery, tmp_path, random.Random(3), STEPS)


@pytest.mark.long
def test_a_run_goes_on_without_worker_0_and_then_with_a_newcomer(soak, tmp_path):
    slow = tmp_path / "slow"
    slow.touch()
    run = soak.start("hanging", 3, "run", "--slow-while", slow, "--slow-s", 0.1)
    run.launcher.wait_for_step(10)
    run.newcomers()
    os.kill(run.members[0], signal.SIGKILL)
    run.launcher.wait_for("new workers have joined")
    slow.unlink()
    soak.expect("hanging")
    soak.judge(run, "hanging")
    lost, joined = run.launcher.stderr().splitlines()
    assert re.fullmatch(
        r"samestep: .*: worker 0 is gone \(.*\); going on with 2 workers after step \d+", lost
    )
    assert re.fullmatch(r"samestep: new workers have joined; going on with 3 workers after step \d+", joined)
    events = [line for line in read_lines(run.folder / "run") if line.get("event") in ("start", "end")]
    told = [line.get("workers", line.get("reason")) for line in events]
    assert told == [3, 2, "new workers have joined", 3, "done"]


@pytest.mark.long
def test_a_newcomer_that_cannot_begin_is_replaced_in_turn(nursery, tmp_path):
    job = nursery.start_program([sent_away.__file__, tmp_path], tmp_path / "output")
    assert job.wait() == [0]
    lines = job.stderr().splitlines()
    assert any("new workers cannot start at this call, so they exit" in line for line in lines)
    assert any("going on with 1 worker " in line for line in lines)
    assert lines[-1].startswith("samestep: new workers have joined; going on with 3 workers ")
