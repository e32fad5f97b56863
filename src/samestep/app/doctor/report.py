"""The report of `samestep doctor`: Markdown to paste into an issue, printed line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from samestep.app.doctor.found import Finding, find
from samestep.app.doctor.measurements import Measurements
from samestep.app.doctor.runs import Fault, Runs
from samestep.app.doctor.trials import Trials
from samestep.errors import ConfigError
from samestep.workers.environment import under_launcher
from samestep.workers.job import init

__all__ = ["RECIPE", "examine"]

RECIPE = ("digits", "--optimizer", "adamw")
"""Arguments of `samestep train`: a recipe with convolutions, batch norm, dropout and random augmentation."""


def examine(device: str = "auto", *, is_run: bool = True, recipe: Sequence[str] = RECIPE) -> int:
    """Print a description of this machine, whether runs end with the same bits, and what a step costs.

    Args:
        device: as for `samestep.init`.
        is_run: whether to do the small runs.
        recipe: the arguments of `samestep train` in these runs.

    Returns:
        The exit status: 0 if there was no problem, otherwise 1.

    Raises:
        ConfigError: there is no such device, or a launcher has started this process.
        StorageError: there is no folder for temporary files.
    """
    if under_launcher():
        raise ConfigError("doctor starts workers by itself: run it as one process, without torchrun")
    chosen = init(device).device
    _print("## samestep doctor\n")
    problems = _print_findings(find(chosen))
    if is_run:
        num_gpus = torch.cuda.device_count() if chosen.type == "cuda" else 0
        with Runs() as runs:
            _print("\n### The same weights\n")
            problems += _try(Trials(runs, recipe, chosen.type, num_gpus), "FAILED")
            _print("\n### What it costs here\n")
            _try(Measurements(runs, chosen.type, max(2, num_gpus)), "not measured")
    fine = "everything holds" if is_run else "nothing is missing; nothing was run"
    _print("\n" + (f"does not hold: {'; '.join(problems)}" if problems else fine))
    return 1 if problems else 0


def _print_findings(findings: Iterable[Finding]) -> list[str]:
    """Print each finding at once, and return the names of those with which samestep cannot run."""
    problems = []
    for finding in findings:
        _print(f"- {finding.name}: {'' if finding.holds else 'FAILED: '}{finding.text}")
        if not finding.holds:
            problems.append(finding.name)
    return problems


def _try(trials: Iterable[tuple[str, Callable[[], str]]], mark: str) -> list[str]:
    """Run the trials in order, print each result, and return the names of those that failed."""
    failed = []
    for name, work in trials:
        start_s = time.monotonic()
        try:
            text = work()
        except Fault as fault:
            failed.append(name)
            text = f"{mark}: {fault}"
        _print(f"- {name} ({time.monotonic() - start_s:.1f} s): {text}")
    return failed


def _print(line: str) -> None:
    print(line, flush=True)
