"""Checks with real workers: what only they can show, and the command."""

import multiprocessing
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

import samestep
from samestep import cli, recipes
from samestep.checking.findings import explain
from samestep.checking.recorder import Trial, record
from samestep.checking.recording import first_difference
from samestep.checking.result import _Built
from samestep.checking.workers import Workers, recordings
from samestep.errors import LostWorkerError
from samestep.recipes.digits.recipe import DigitsSettings

from .. import planted


@pytest.fixture(scope="module")
def workers(forkserver):
    """Forked from a process that has imported torch, and no module of the subjects; the command's are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: forkserver)
        started = Workers(3, device="cpu", threads=1)
    with started:
        yield started


def built(kind, build=planted.build, **options):
    return _Built(partial(build, kind), [planted.batch()], 5, None, options)


def compare(workers, subject, num_workers, *, operators):
    """Return how the reference and the workers differ, and what the workers recorded."""
    threads = torch.get_num_threads()
    alone = record(subject, samestep.init("cpu"), Trial(0, 2, operators))
    torch.set_num_threads(threads)
    others = recordings(workers.record(subject, Trial(1, 2, operators), num_workers))
    assert [len(other.turns) > 3 for other in others] == [True] * num_workers
    return first_difference(alone, others)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3])
def test_real_workers_do_the_same(workers, num_workers):
    assert compare(workers, built(planted.Clean), num_workers, operators=True) is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("subject", "cause"),
    [
        (
            built(planted.DrawnAtImport),
            "DRAWN_AT_IMPORT of the Python module tests.planted differs from the start",
        ),
        (
            built(planted.Buffer, buffers={"1.average": "ignore"}),
            "average of 1 (Buffer) is a tensor that carries over",
        ),
        (
            built(planted.DrawnInBuild, planted.build_without_seed),
            "noise of 1 (DrawnInBuild) differs from the start",
        ),
    ],
)
def test_what_only_processes_have_for_themselves(workers, subject, cause):
    finding = explain(compare(workers, subject, 2, operators=True), 2)
    assert finding.cause.startswith(cause)
    assert finding.module.startswith("1 (")


def test_an_exception_in_one_worker_is_raised_and_the_others_go_on(workers):
    with pytest.raises(ZeroDivisionError, match="planted"):
        recordings(workers.record(built(planted.FailsOnWorker1), Trial(0, 1), 2))
    assert len(recordings(workers.record(built(planted.Clean), Trial(0, 1), 3))) == 3


def test_an_exception_that_cannot_be_sent_is_raised_in_words(workers):
    with pytest.raises(RuntimeError, match=r"^worker 1 raised TwoWords: planted here$"):
        recordings(workers.record(built(planted.FailsInOwnWords), Trial(0, 1), 2))


def test_a_worker_that_dies_is_no_script_that_runs_itself(forkserver, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forkserver)
    with (
        Workers(2, device="cpu", threads=1) as workers,
        pytest.raises(LostWorkerError, match="in the middle of the check"),
    ):
        workers.record(built(planted.DiesOnWorker1), Trial(0, 1), 2)


# ---- the command -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_recipe_that_keeps_the_promise(tmp_path, capfd):
    options = ["--towers", "3", "--batch-size", "32", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    assert cli.main(["check", "digits", *options]) == 0
    printed = "same bits: digits, 3 towers, 3 steps, placements 1, 1, 2 workers\n"
    assert tuple(capfd.readouterr()) == (printed, "")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Faulty(DigitsSettings):
    """Digits, with a counter in the first layer."""

    recipe: ClassVar[str] = "faulty"

    def build(self, job):
        experiment = super().build(job)
        calls = []

        def count(module, inputs):
            calls.append(1)
            return (inputs[0] * len(calls),)

        experiment.model[0].register_forward_pre_hook(count)
        return experiment


@pytest.mark.long
def test_a_recipe_that_does_not(monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECIPES", {"faulty": Faulty, "digits": DigitsSettings})
    assert cli.main(["check", "faulty", "--towers", "4", "--batch-size", "16", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not the same bits: one worker and 2 workers differ first in step 0, tower 2"
    assert lines[1:3] == ["  module     the model (DigitsNet)", "  operator   aten.mul.Tensor, forward"]
    assert (
        lines[4]
        == "  cause      calls of the function around Faulty.build.<locals>.count is kept from tower to tower"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("check", "a recipe is missing, expected one of digits, cifar10, segmentation, lm"),
        ("check digits --towers 2 --workers 3", "workers = 3: expected 1 <= workers <= towers = 2; start at"),
    ],
)
def test_a_wrong_command_line(line, problem, capsys):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"samestep: error: {problem}")
