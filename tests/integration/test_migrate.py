"""The programs that docs/migrate.md sets side by side."""

import sys

import pytest

from .test_examples import EXAMPLES, printed  # noqa: F401 - a fixture

sys.path.insert(0, str(EXAMPLES / "migrate"))
from compare import read

OTHER_PACKAGE = pytest.mark.packages


@pytest.fixture
def outcome(printed):  # noqa: F811
    """Run a program on some workers; return its distance from the truth, and its digest or None."""
    programs = EXAMPLES / "migrate"
    return lambda name, num_workers: read("\n".join(printed(programs / f"{name}.py", num_workers)))


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        "samestep_loop",
        pytest.param("accelerate_towers", marks=OTHER_PACKAGE),
        pytest.param("fabric_towers", marks=OTHER_PACKAGE),
    ],
)
def test_with_towers_the_result_is_the_truth_and_the_same_bits(outcome, program):
    outcomes = [outcome("samestep_loop", 1), outcome(program, 2)]
    assert all(distance < 1e-6 for distance, _ in outcomes)
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize(
    ("program", "num_workers"),
    [
        ("plain", 1),
        ("ddp", 2),
        pytest.param("accelerate_loop", 2, marks=OTHER_PACKAGE),
        pytest.param("fabric_loop", 2, marks=OTHER_PACKAGE),
    ],
)
def test_means_of_means_miss_the_truth(outcome, program, num_workers):
    distance, _ = outcome(program, num_workers)
    assert distance > 0.01
