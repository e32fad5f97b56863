"""`samestep eval` beside a run: other weights, other placements, and following."""

import shutil
import time

import pytest

from .nursery import SAMESTEP
from .test_digits import train


@pytest.mark.long
def test_follow_goes_on_until_training_ends(run, nursery, tmp_path):
    train(run, tmp_path, "--workers", "1", "--checkpoint-every", "4")
    last = tmp_path / "checkpoints" / "step-00000012"
    aside = tmp_path / "aside"
    last.rename(aside)
    words = ["eval", tmp_path, "--follow", "--workers", "2"]
    follower = nursery.start_program([*SAMESTEP, *words], tmp_path / "output")
    follower.wait_for(": step 8: test accuracy = 0.")
    time.sleep(1.5)
    assert follower.ended() == 0
    aside.rename(last)
    assert follower.wait(30) == [0]
    assert [line.split(": ")[1] for line in follower.stdout().splitlines()] == ["step 8", "step 12"]


@pytest.mark.long
def test_no_checkpoint_is_said(run, tmp_path):
    train(run, tmp_path, "--workers", "1")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()
    finished = run("eval", tmp_path, "--workers", "1", expect=2)
    assert "has no checkpoint" in finished.stderr()
    assert len(finished.stderr().splitlines()) == 1
