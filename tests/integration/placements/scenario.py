"""The scenarios that all placements run, by name, and how those that end in an error say so."""

from collections.abc import Callable

import samestep

Scenario = Callable[[samestep.Job], str]

SCENARIOS: dict[str, Scenario] = {}
FAULTS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Note a scenario that returns the same text on all placements."""
    SCENARIOS[function.__name__] = function
    return function


def fault(function: Scenario) -> Scenario:
    """Note a scenario that ends in an error; `job.rank == 1` is the worker that differs."""
    FAULTS[function.__name__] = function
    return function


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
