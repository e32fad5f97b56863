"""The programs in examples/ that a launcher starts run, and print the same on one worker and on two."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def printed(nursery, tmp_path):
    """Run a program on some workers, and return the lines that worker 0 prints."""

    def run(program, num_workers):
        finished = nursery.run([program], tmp_path / "output", num_workers)
        assert finished.wait() == [0] * num_workers, finished.stderr()
        return finished.stdout().splitlines()

    return run


@pytest.mark.long
def test_training_ends_in_the_same_weights(printed):
    alone = printed(EXAMPLES / "towers.py", 1)
    assert printed(EXAMPLES / "towers.py", 2) == alone
    assert alone[-1].startswith("weights sha256 ")


@pytest.mark.long
def test_a_loop_of_ones_own_goes_on_without_worker_0(nursery, printed, tmp_path):
    alone = printed(EXAMPLES / "elastic.py", 1)
    job = nursery.start_program([EXAMPLES / "elastic.py"], tmp_path / "two")
    job.wait_for("epoch 1")
    os.kill(job.started_by(0)[0], signal.SIGKILL)
    assert job.wait() == [0], job.output()
    assert job.stdout().splitlines()[-1] == alone[-1]
    assert "worker 0 is gone" in job.stderr()


@pytest.mark.long
def test_the_histogram_of_all_predictions(printed):
    unsplit, whole, average = printed(EXAMPLES / "histogram.py", 2)
    expected = unsplit.removeprefix("unsplit").strip()
    assert expected.endswith("difference none but rounding")
    assert whole.removeprefix("whole batch").strip() == expected
    assert "rounding" not in average


@pytest.mark.long
def test_an_example_as_a_user_starts_it():
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "histogram.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout.splitlines()) == 3
    assert finished.stderr.count("Warning") == 1  # of the third way, which the example shows as the wrong one
    assert "UserWarning: Tower(index=15, rows=8): its loss has pow of means of features" in finished.stderr
