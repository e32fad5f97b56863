"""A run that is killed goes on, on another number of workers, with the same bits."""

import os
import signal
import time

import pytest

from ..forgery import contents
from .nursery import SAMESTEP
from .test_digits import digest_of

RUN = ["train", "digits", "--steps", "60", "--batch-size", "64", "--towers", "7", "--checkpoint-every", "5"]


def words(run_dir, num_workers):
    return [*RUN, "--run-dir", run_dir, "--workers", num_workers]


def kill_after_a_checkpoint(process, run_dir, number):
    """Kill all workers of a run after some checkpoints, so that nobody is left to go on."""
    while len(checkpoints(run_dir)) < number:
        assert process.ended() == 0
        time.sleep(0.01)
    process.signal(signal.SIGSTOP)  # or it would start others
    for pid in process.started_by(0):
        os.kill(pid, signal.SIGKILL)
    process.signal(signal.SIGCONT)
    assert process.wait(60) == [1]
    assert "was killed by SIGKILL" in process.stderr()


def checkpoints(run_dir):
    return sorted((run_dir / "checkpoints").glob("step-????????"))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_with_the_same_bits_on_other_workers(run, nursery, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = digest_of(run(*words(whole, 1)).stdout())
    kill_after_a_checkpoint(
        nursery.start_program([*SAMESTEP, *words(parts, 3)], tmp_path / "output"), parts, 2
    )
    killed_at = len(checkpoints(parts))
    assert killed_at < 12
    (checkpoints(parts)[-1] / "manifest.json").write_bytes(b"")
    finished = run(*words(parts, 2))
    assert digest_of(finished.stdout()) == expected
    assert "is not the manifest of a checkpoint" in finished.stderr()
    assert len(list((parts / "checkpoints").glob("*.damaged"))) == 1
    assert contents(checkpoints(parts)[-1]) == contents(checkpoints(whole)[-1])
