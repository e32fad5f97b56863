"""The programs that docs/migrate.md sets side by side."""

import sys

import pytest

from .test_examples import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "migrate"))
from compare import outcome


@pytest.fixture(scope="module")
def expected():
    distance, digest = outcome("samestep_loop", 1)
    assert distance < 1e-6
    return digest


@pytest.mark.parametrize("program", ["samestep_loop", "accelerate_towers", "fabric_towers"])
def test_with_towers_the_result_is_the_truth_and_the_same_bits(expected, program):
    distance, digest = outcome(program, 2)
    assert distance < 1e-6
    assert digest == expected


@pytest.mark.parametrize(
    ("program", "processes"), [("plain", 1), ("ddp", 2), ("accelerate_loop", 2), ("fabric_loop", 2)]
)
def test_means_of_means_miss_the_truth(program, processes):
    distance, _ = outcome(program, processes)
    assert distance > 0.01
