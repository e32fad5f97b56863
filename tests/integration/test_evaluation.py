"""`samestep eval` beside a run: other weights, other placements, and following."""

import subprocess
import time

from .test_digits import SAMESTEP, run, train


def figure_of(line):
    return line.split(": step ")[1]


def test_follow_goes_on_until_training_ends(tmp_path):
    train(tmp_path, "--workers", "1", "--checkpoint-every", "4")
    last = tmp_path / "checkpoints" / "step-00000012"
    aside = tmp_path / "aside"
    last.rename(aside)
    follower = subprocess.Popen(
        [*SAMESTEP, "eval", tmp_path, "--follow", "--workers", "2"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert figure_of(follower.stdout.readline()).startswith("8: test accuracy = 0.")
        time.sleep(1.5)
        assert follower.poll() is None
        aside.rename(last)
        assert figure_of(follower.stdout.readline()).startswith("12: test accuracy = 0.")
        assert follower.wait(30) == 0
    finally:
        follower.kill()
        follower.stdout.close()


def test_no_checkpoint_is_said(tmp_path):
    train(tmp_path, "--workers", "1")
    subprocess.run(["rm", "-r", tmp_path / "checkpoints"], check=True)
    finished = run(*SAMESTEP, "eval", tmp_path, "--workers", "1", expect=2)
    assert "has no checkpoint" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
