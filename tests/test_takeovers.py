"""Takeover on simulated workers; `python -m tests.takeovers` tries thousands of seeds."""

import pytest

from .takeovers import try_one, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("seed", range(25))
def test_whoever_is_killed_and_whoever_comes_the_bits_are_the_same(seed, expected):
    assert try_one(seed, expected)[1] is None
