"""Takeover on simulated workers; `python -m tests.takeovers` tries thousands of seeds."""

import pytest

from .renewal import Town
from .simulation import Faults, Killed
from .takeovers import judge, quietly, train, try_one, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("seed", range(25))
def test_whoever_is_killed_and_whoever_comes_the_bits_are_the_same(seed, expected):
    assert try_one(seed, expected)[1] is None


@pytest.mark.parametrize("event", range(33, 44))  # more than those of one step
def test_what_worker_0_had_no_time_to_log_is_logged_by_the_next_one(event, expected, tmp_path):
    """Killed in the simulation's own way, its last messages would be lost with it, and the step redone."""

    def die():
        raise Killed

    town = Town(2, 0, Faults(killed={0: event + 1}))
    town.workers[0].calls[event, True] = die
    with quietly():
        outcomes = town.run(lambda job: train(job, tmp_path))
    assert judge(town, outcomes, expected, tmp_path) is None
