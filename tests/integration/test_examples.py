"""The programs in examples/ run, and print the same on one worker and on two."""

import sys
from pathlib import Path

import pytest

from .test_digits import run

EXAMPLES = Path(__file__).parents[2] / "examples"


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("name", ["towers.py", "contrastive.py"])
def test_training_ends_in_the_same_weights(name):
    alone = run(sys.executable, EXAMPLES / name).stdout
    assert run(*LAUNCHER, EXAMPLES / name).stdout == alone
    assert alone.splitlines()[-1].startswith("weights sha256 ")


def test_the_histogram_of_all_predictions():
    unsplit, whole, average = run(*LAUNCHER, EXAMPLES / "histogram.py").stdout.splitlines()
    expected = unsplit.removeprefix("unsplit").strip()
    assert expected.endswith("difference none but rounding")
    assert whole.removeprefix("whole batch").strip() == expected
    assert "rounding" not in average
