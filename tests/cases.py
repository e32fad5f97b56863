"""Parametrized tests of which `make test` runs a few cases, and `make test-all` all of them."""

from collections.abc import Collection, Iterable

import pytest


def mostly_long(cases: Iterable, num_short: int) -> list:
    """Return the cases for `parametrize`, with all but the first `num_short` marked `long`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.long] if number >= num_short else [],
        )
        for number, case in enumerate(cases)
    ]


def seeds(count: int, num_short: int) -> list:
    """Return seeds of random programs: `make test-all` runs the first 60, and `make slow` the others."""
    return [
        *mostly_long(range(min(count, 60)), num_short),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, count)),
    ]


def with_long(names: Iterable[str], long: Collection[str]) -> list:
    """Return names for `parametrize`, with those in `long` marked `long`."""
    names = list(names)
    assert set(long) <= set(names), set(long) - set(names)
    return [pytest.param(name, marks=[pytest.mark.long] if name in long else []) for name in names]
