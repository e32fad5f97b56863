"""The command line: parse the arguments, call the command, print its result.

Importing torch takes seconds, so it is imported only after the command line has been parsed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import samestep
from samestep import recipes
from samestep.app.bounds import NumWorkers, Threads
from samestep.app.command_line import Command, parse
from samestep.app.launching.failures import Failure
from samestep.app.output import is_stdout_lost, lasting_output
from samestep.app.recipe_file import Recipes, read_recipe
from samestep.errors import Error

if TYPE_CHECKING:
    from samestep.app.launching.nodes import Nodes
    from samestep.app.settings import Settings
    from samestep.workers.job import Job

__all__ = ["Digest", "Doctor", "Eval", "Report", "main"]


@dataclass(frozen=True)
class Eval:
    """Evaluate the newest checkpoint of a run."""

    run_dir: Path
    """The run folder that train wrote: its --run-dir."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is the GPU if there is one."""
    threads: Threads = 1
    """CPU threads of each worker."""
    workers: NumWorkers = "auto"
    """Processes to start here; auto is one per core or GPU, and at most one per tower."""
    weights: Literal["average", "raw"] = "average"
    """Evaluate the moving averages of the weights, if the run keeps them, or the raw weights."""
    recipe: Path | None = None
    """The Python file of the recipe, if it is not an installed one."""
    follow: bool = False
    """Also evaluate each new checkpoint until that of the last step."""


@dataclass(frozen=True)
class Digest:
    """Print the SHA-256 of the weights in a checkpoint."""

    path: Path
    """A checkpoint, or a run folder, for its newest checkpoint."""


@dataclass(frozen=True)
class Report:
    """Write an HTML page with a run's curves, interruptions and settings."""

    run_dir: Path
    """The run folder."""
    output: Path | None = None
    """The HTML file to write; none is RUN_DIR/report.html."""


@dataclass(frozen=True)
class Doctor:
    """Describe this machine and test whether runs on it end with the same bits; for bug reports."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is the GPU if there is one."""
    no_run: bool = False
    """Skip the small test runs, which take a minute or two."""


@lasting_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, in the process that the user started or in one of its workers.

    Args:
        argv: the arguments after the program's name; by default those of this process.

    Returns:
        The exit status: 0 for success, 2 if the command line or an input file is wrong, 1 if the run
        failed, 128 + n if signal n ended it.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"samestep {samestep.__version__}")
        return 0
    if any(word.startswith("--nnodes") for word in words):
        # Without this, torch prints pages of C++ frames for each lost connection. It reads the variable once.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        command = parse("samestep", _commands(), words)
    except SystemExit:  # --help has been printed
        return 0
    except Error as error:
        return _refuse(error)
    from samestep.app.launching.launch import run_worker

    return run_worker(lambda: _run(command, words))


def _commands() -> Command:
    known = Recipes(recipes.RECIPES)
    file = "the path of a Python file that ends in .py"
    choices: dict[str, type | Command] = {
        "train": Command(
            "Train a recipe, by name or from a Python file; continue an earlier run in the same folder. "
            "`samestep train RECIPE --help` lists the options.",
            known,
            noun="recipe",
            others=file,
        ),
        "eval": Eval,
        "digest": Digest,
        "report": Report,
        "check": Command(
            "Train a recipe's first steps on 1, 2 and 3 workers and compare the weights bit for bit. "
            "Takes the options of train: `samestep check RECIPE --help`.",
            known,
            noun="recipe",
            others=file,
        ),
        "doctor": Doctor,
    }
    return Command(
        "Train PyTorch models with the same result, bit for bit, on any number of workers. "
        "--version prints the version.",
        choices,
    )


def _refuse(error: Error) -> int:
    """Print one line that says what is wrong with the command line, and return the exit status."""
    if "RANK" in os.environ:  # the launcher shows one message for all of its workers
        from samestep.app.launching.launch import run_worker
        from samestep.app.start import refuse

        return run_worker(lambda: refuse(error))
    sys.stderr.write(Failure.of(error).text)
    return error.exit_status


def _run(command: Any, words: list[str]) -> int:
    match command:
        case Eval():
            return _eval(command, words)
        case Digest():
            return _digest(command)
        case Report():
            return _report(command)
        case Doctor():
            return _doctor(command)
        case settings if words[0] == "check":
            return _check(settings)
        case settings:
            return _train(settings, words)


def _train(settings: Settings, words: list[str]) -> int:
    from samestep.app.settings import trainer_of

    return _on_workers(settings, words, lambda job: trainer_of(settings, job).run())


def _eval(command: Eval, words: list[str]) -> int:
    from samestep.app.settings import read_settings

    with _refusing():
        # The run folder may name a Python file, which is run only if --recipe names it, too.
        own = None if command.recipe is None else read_recipe(command.recipe)
        settings = replace(
            read_settings(command.run_dir, recipes.RECIPES, own=own),
            workers=command.workers,
            nnodes=None,
            rdzv_endpoint=None,
            device=command.device,
            threads=command.threads,
        )

    def work(job: Job) -> None:
        from samestep.app.evaluate_run import evaluate_run

        evaluate_run(settings, job, weights=command.weights, follow=command.follow)

    return _on_workers(settings, words, work, weights=command.weights, follow=command.follow)


def _check(settings: Settings) -> int:
    from samestep.app.recipe_check import check_recipe

    result = check_recipe(settings)
    print(result)
    return 0 if result.same else 1


def _digest(command: Digest) -> int:
    from samestep.app.run_folder import read_digest

    print(read_digest(command.path), flush=True)
    return 1 if is_stdout_lost() else 0  # without its output, the command has done nothing


def _report(command: Report) -> int:
    from samestep.app.reporting.report import write_report

    print(write_report(command.run_dir, command.output), flush=True)
    return 0


def _doctor(command: Doctor) -> int:
    from samestep.app.doctor.report import examine

    return examine(command.device, is_run=not command.no_run)


def _refusing() -> AbstractContextManager[None]:
    """Under a launcher, report an error in the block to the other workers."""
    from samestep.workers.environment import under_launcher

    if not under_launcher():
        return nullcontext()
    from samestep.app.start import refusing

    return refusing()


def _on_workers(
    settings: Settings, words: list[str], work: Callable[[Job], object], **options: object
) -> int:
    """Start the workers that the settings ask for; in a worker, call `work`."""
    from samestep.app.launching.launch import run_command
    from samestep.app.launching.num_workers import resolve_workers
    from samestep.workers.environment import check_environment, under_launcher

    check_environment()
    if not under_launcher():
        workers = resolve_workers(
            settings.workers, settings.towers, settings.device, threads=settings.threads
        )
        nodes = _nodes(settings, words, options)
        if workers > 1 or nodes is not None:
            command = [sys.executable, "-m", "samestep", *words]
            return run_command(command, workers, threads=settings.threads, nodes=nodes)
    from samestep.app.launching.script import join
    from samestep.app.start import refusing, start

    with refusing():
        resolve_workers(settings.workers, settings.towers, threads=settings.threads)
    job = start(settings, words[0], **options)
    join(job, work)
    return 0


def _nodes(settings: Settings, words: list[str], options: Mapping[str, object]) -> Nodes | None:
    """Return the hosts of the job, with the values that must be the same on all of them."""
    from samestep.app.launching.nodes import Nodes

    nodes = Nodes.of(settings.nnodes, settings.rdzv_endpoint, settings.rdzv_id)
    if nodes is None:
        return None
    from samestep.app.start import values_of

    values = {name: str(value) for name, value in values_of(settings, words[0], options).items()}
    return replace(nodes, timeout_s=settings.timeout, most_workers=settings.towers, must_match=values)
