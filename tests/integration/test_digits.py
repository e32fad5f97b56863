"""The main job, as a user runs it: the same digest however its workers are started."""

import os
import re
import subprocess
import sys

import pytest

from ..forgery import contents

SHORT = ["--steps", "12", "--batch-size", "250"]
SAMESTEP = [sys.executable, "-m", "samestep"]


def run(*command, expect=0):
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert finished.returncode == expect, finished.stderr
    return finished


def digest_of(finished):
    *_, last = finished.stdout.splitlines()
    return re.fullmatch(r"weights sha256 ([0-9a-f]{64})", last)[1]


def train(run_dir, *options):
    return digest_of(run(*SAMESTEP, "train", "digits", *SHORT, "--run-dir", run_dir, *options))


@pytest.mark.parametrize(
    "options",
    [
        ["--towers", "8"],
        ["--towers", "7", "--autocast", "bf16", "--optimizer", "adamw"],
    ],
    ids=" ".join,
)
def test_any_number_of_workers_gives_the_same_digest(tmp_path, options):
    digests = {
        workers: train(tmp_path / str(workers), *options, "--workers", str(workers)) for workers in (1, 3)
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun = [*launcher, "-m", "samestep", "train", "digits", *SHORT, "--run-dir", tmp_path / "torchrun"]
    digests["torchrun"] = digest_of(run(*torchrun, *options))
    assert len(set(digests.values())) == 1, digests
    checkpoints = [contents(tmp_path / name / "checkpoints") for name in ("1", "3", "torchrun")]
    assert checkpoints[0] == checkpoints[1] == checkpoints[2]
    assert len(checkpoints[0]) == 4


def test_eval_and_digest_work_on_what_train_wrote(tmp_path):
    digest = train(tmp_path, "--workers", "1")
    assert run(*SAMESTEP, "digest", tmp_path).stdout.strip() == digest
    alone = run(*SAMESTEP, "eval", tmp_path, "--workers", "1").stdout
    metric = re.search(r"step 12: test accuracy = 0\.\d{4}$", alone.strip())[0]
    assert metric in run(*SAMESTEP, "eval", tmp_path, "--workers", "2").stdout
    assert metric in run(*SAMESTEP, "eval", tmp_path, "--workers", "1", "--weights", "raw").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--towers", "2", "--workers", "3"], "workers = 3: expected 1 <= workers <= towers = 2"),
        (["--batch-size", "0"], "--batch-size 0: expected at least 1"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path, options, message):
    finished = run(*SAMESTEP, "train", "digits", "--run-dir", tmp_path, *options, expect=2)
    assert len(finished.stderr.splitlines()) == 1
    assert message in finished.stderr


def test_another_experiment_in_the_folder_is_refused(tmp_path):
    train(tmp_path, "--workers", "1")
    finished = run(
        *SAMESTEP, "train", "digits", *SHORT, "--seed", "1", "--run-dir", tmp_path, "--workers", "1", expect=2
    )
    assert "was trained with seed = 0, not 1" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
