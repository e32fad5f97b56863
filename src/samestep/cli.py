"""The commands: parses, calls, prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from tyro.conf import Positional, arg

from samestep.app.command_line import Command, parse
from samestep.app.launch import launch, resolve_workers, run_worker
from samestep.workers.job import Job, init, under_launcher

if TYPE_CHECKING:
    from samestep.app.settings import Settings

__all__ = ["Digest", "Eval", "main"]


@dataclass(frozen=True)
class Eval:
    """Evaluate the checkpoint of a run."""

    run_dir: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """The folder that train wrote, its --run-dir."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on; auto is the GPU where there is one."""
    threads: int = 1
    """CPU threads of each worker."""
    workers: int | Literal["auto"] = "auto"
    """Processes to start here; auto is one for each core or GPU."""
    weights: Literal["average", "raw"] = "average"
    """Evaluate the moving averages of the weights where a run keeps them, or the raw weights."""
    follow: bool = False
    """Go on with each new checkpoint until training ends."""


@dataclass(frozen=True)
class Digest:
    """Print the SHA-256 of the weights in a checkpoint."""

    path: Annotated[Positional[Path], arg(metavar="PATH")]
    """A checkpoint, or the folder of a run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, as the process that the user started or as one of its workers.

    Args:
        argv: the words after the program's name; by default those of this process.

    Returns:
        The exit status: 0 done, 2 the command line or an input file is wrong, 1 the run failed,
        128 + the signal's number where one ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    return run_worker(lambda: _run(words))


def _run(words: list[str]) -> int:
    match parse("samestep", _commands(), words):
        case Eval() as command:
            return _eval(command, words)
        case Digest() as command:
            return _digest(command)
        case settings if words[0] == "check":
            return _check(cast("Settings", settings))
        case settings:
            return _train(cast("Settings", settings), words)


def _commands() -> Command:
    from samestep.recipes import RECIPES

    train = Command(
        "Train a recipe, from its newest whole checkpoint if there is one.", RECIPES, noun="recipe"
    )
    check = Command(
        "Compare the bits of a recipe's first steps on 1, 2 and 3 workers; takes the options of train.",
        RECIPES,
        noun="recipe",
    )
    return Command("", {"train": train, "eval": Eval, "digest": Digest, "check": check})


def _train(settings: Settings, words: list[str]) -> int:
    from samestep.app.training import train

    return _on_workers(settings, words, lambda job: train(settings, job))


def _eval(command: Eval, words: list[str]) -> int:
    from samestep.app.evaluation import evaluate_run
    from samestep.app.settings import read_settings
    from samestep.recipes import RECIPES

    settings = replace(
        read_settings(command.run_dir, RECIPES),
        workers=command.workers,
        device=command.device,
        threads=command.threads,
    )
    return _on_workers(
        settings,
        words,
        lambda job: evaluate_run(settings, job, weights=command.weights, follow=command.follow),
    )


def _on_workers(settings: Settings, words: list[str], work: Callable[[Job], int]) -> int:
    """Do the work on the workers that the settings ask for: start them, or be one of them."""
    workers = resolve_workers(settings.workers, settings.towers, settings.device, threads=settings.threads)
    if workers > 1 and not under_launcher():
        return launch([sys.executable, "-m", "samestep", *words], workers, threads=settings.threads)
    job = init(settings.device, threads=settings.threads, timeout_s=settings.timeout)
    status = work(job)
    job.close()
    return status


def _check(settings: Settings) -> int:
    from samestep.app.recipe_check import check_recipe

    result = check_recipe(settings)
    print(result)
    return 0 if result.same else 1


def _digest(command: Digest) -> int:
    from samestep.app.run_folder import read_digest

    print(read_digest(command.path))
    return 0
