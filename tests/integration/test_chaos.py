"""Random faults, some of each kind: real processes, real signals. `make chaos` runs hundreds."""

import random

from .chaos import KINDS, strike

SEED = 7
TIMES = {"SIGSTOP of one worker": 1}


def test_a_run_ends_with_the_same_bits_whatever_happens_on_the_way(nursery, whole, tmp_path):
    kinds = [name for name in KINDS for _ in range(TIMES.get(name, 2))]
    random.Random(SEED).shuffle(kinds)
    outcomes = list(strike(nursery, tmp_path, kinds, SEED, whole))
    assert [outcome for outcome in outcomes if not outcome.is_same] == []
    assert sum(outcome.hit for outcome in outcomes) == len(kinds) >= 15
