"""Faults at random moments, one of each kind: real processes, real signals. `make chaos` runs hundreds."""

import random

import pytest

from .chaos import KINDS, strike

SEED = 7


@pytest.mark.long
def test_a_run_ends_with_the_same_bits_whatever_happens_on_the_way(nursery, whole, tmp_path):
    kinds = random.Random(SEED).sample(list(KINDS), len(KINDS))
    outcomes = list(strike(nursery, tmp_path, kinds, SEED, whole))
    assert [outcome for outcome in outcomes if not outcome.is_same] == []
    assert sum(outcome.hit for outcome in outcomes) == len(KINDS)
