"""Cases of a test of which `make test` runs a few, and `make test-all` all."""

from collections.abc import Iterable

import pytest


def mostly_long(cases: Iterable, num_short: int) -> list:
    """Return what `parametrize` takes: the cases after the first few are marked `long`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.long] if number >= num_short else [],
        )
        for number, case in enumerate(cases)
    ]
