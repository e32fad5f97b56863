"""How a worker starts: it joins the job, and all compare their settings before anything is read or trained.

The workers of a job may have been started by hand on several machines, each with its own command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from samestep.app.settings import Settings
from samestep.errors import ConfigError, DisagreementError, Error, LostWorkerError
from samestep.workers.agreement import agree, difference
from samestep.workers.environment import world_size
from samestep.workers.job import Job, init

__all__ = ["compare_settings", "refuse", "refusing", "start", "values_of"]

_WHERE = "start"
_REFUSAL_S = 30.0
"""How long a worker that cannot start waits for the others, to let them know."""


def start(settings: Settings, command: str, **options: object) -> Job:
    """Join the job as one of its workers, all of which must come with the same settings.

    Args:
        settings: of the recipe.
        command: the command that they are for, such as "train".
        options: what else the command was given.

    Raises:
        ConfigError: workers were started with different settings, or one of them cannot start.
        LostWorkerError: the workers have not found each other within the timeout.
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
    """Return what has to be the same on all workers, by the names that the command line has for it.

    Args:
        settings: of the recipe.
        command: that they are for.
        options: what else it was given.
    """
    given = {**asdict(settings), **options}
    for name in settings.per_worker & given.keys():  # may differ, but not be left out on some
        given[name] = "left out" if given[name] is None else "given"
    flags = {f"--{name.replace('_', '-')}": _as_text(value) for name, value in given.items()}
    return {"command": command, "recipe": settings.recipe, **flags}


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@contextmanager
def refusing() -> Iterator[None]:
    """Let all workers end where this one finds an error before it has joined them."""
    try:
        yield
    except LostWorkerError:
        raise
    except Error as error:
        refuse(error)


def refuse(error: Error) -> NoReturn:
    """Raise an error that keeps this worker from starting; the others, which wait for it, get it in words."""
    if world_size() > 1:
        with suppress(LostWorkerError):  # what is wrong here counts, whether or not others hear of it
            agree(init("cpu", timeout_s=_REFUSAL_S), {}, where=_WHERE, error=error)
    raise error
