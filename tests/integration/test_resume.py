"""A run that is killed goes on, on another number of workers, with the same bits."""

import os
import re
import signal
import subprocess
import time

import pytest

from ..forgery import contents
from .test_digits import SAMESTEP, digest_of, run

RUN = ["train", "digits", "--steps", "120", "--batch-size", "64", "--towers", "7", "--checkpoint-every", "10"]


def command(run_dir, num_workers):
    return [*SAMESTEP, *RUN, "--run-dir", str(run_dir), "--workers", str(num_workers)]


def kill_after_a_checkpoint(run_dir, num_workers, number):
    """Start a run, and kill worker 0, which holds the lock and writes, after some checkpoints."""
    process = subprocess.Popen(command(run_dir, num_workers), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while len(checkpoints(run_dir)) < number:
            assert process.poll() is None
            time.sleep(0.01)
        pid = re.match(r"PID (\d+) on ", (run_dir / "lock").read_text())[1]
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait(60) == 1
        assert f"(pid {pid}) was killed by SIGKILL" in process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate()


def checkpoints(run_dir):
    return sorted((run_dir / "checkpoints").glob("step-????????"))


@pytest.mark.timeout(400)
def test_a_killed_run_goes_on_with_the_same_bits_on_other_workers(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = digest_of(run(*command(whole, 1)))
    kill_after_a_checkpoint(parts, 3, 2)
    killed_at = len(checkpoints(parts))
    assert killed_at < 12
    (checkpoints(parts)[-1] / "manifest.json").write_bytes(b"")
    finished = run(*command(parts, 2))
    assert digest_of(finished) == expected
    assert "is not the manifest of a checkpoint" in finished.stderr
    assert len(list((parts / "checkpoints").glob("*.damaged"))) == 1
    assert contents(checkpoints(parts)[-1]) == contents(checkpoints(whole)[-1])
