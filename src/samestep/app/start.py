"""The start of a worker: it joins the job, and all workers compare their settings before they do anything.

The workers of a job may have been started by hand on several machines, each with its own command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from samestep.app.settings import Settings
from samestep.errors import ConfigError, DisagreementError, Error, LostWorkerError
from samestep.workers.agreement import agree, difference
from samestep.workers.environment import world_size
from samestep.workers.job import Job, init

__all__ = ["compare_settings", "refuse", "refusing", "start", "values_of"]

_WHERE = "start"
_REFUSAL_S = 30.0
"""How long a worker that cannot start waits for the others, to report its error to them."""


def start(settings: Settings, command: str, **options: object) -> Job:
    """Join the job, and check that all workers have the same settings.

    Args:
        settings: the settings of the recipe.
        command: the name of the command, such as "train".
        options: further options of the command.

    Raises:
        ConfigError: workers were started with different settings, or one of them cannot start.
        LostWorkerError: the workers did not find each other within the timeout.
    """
    with refusing():
        job = init(settings.device, threads=settings.threads, tf32=settings.tf32, timeout_s=settings.timeout)
    compare_settings(job, settings, command, **options)
    return job


def compare_settings(job: Job, settings: Settings, command: str, **options: object) -> None:
    """Raise a `ConfigError` on all workers unless all have the same settings; see `start`."""
    try:
        all_values = agree(job, {}, where=_WHERE, message=values_of(settings, command, options))
    except DisagreementError as error:  # another worker cannot start
        raise ConfigError(str(error)) from error
    sentence = difference(all_values)
    if sentence:
        raise ConfigError(f"{_WHERE}: {sentence}: start all workers with the same command line")


def values_of(settings: Settings, command: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the values that must be the same on all workers, by their names on the command line.

    Args:
        settings: the settings of the recipe.
        command: the name of the command.
        options: further options of the command.
    """
    given = {**settings.plain_values(), **options}
    for name in settings.per_worker & given.keys():  # may differ, but all workers or none must set it
        given[name] = "left out" if given[name] is None else "given"
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return {"command": command, "recipe": settings.recipe, **flags}


@contextmanager
def refusing() -> Iterator[None]:
    """Report an error in the block to the other workers, so that all end; for errors before joining."""
    try:
        yield
    except LostWorkerError:
        raise
    except Error as error:
        refuse(error)


def refuse(error: Error) -> NoReturn:
    """Raise an error that keeps this worker from starting, and report it to the others that wait for it."""
    if world_size() > 1:
        with suppress(LostWorkerError):  # raise this worker's own error, even if the others are not there
            agree(init("cpu", timeout_s=_REFUSAL_S), {}, where=_WHERE, error=error)
    raise error
