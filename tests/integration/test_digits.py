"""The main job, as a user runs it: the same digest however its workers are started."""

import os
import re
import subprocess
import sys

import pytest

from ..cases import mostly_long
from ..forgery import contents
from .nursery import SAMESTEP

SHORT = ["--steps", "12", "--batch-size", "60"]
OPTIONS = [["--towers", "7", "--optimizer", "adamw"], ["--towers", "8", "--autocast", "bf16"]]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def digest_of(stdout):
    *_, last = stdout.splitlines()
    return re.fullmatch(r"weights sha256 ([0-9a-f]{64})", last)[1]


def train(run, run_dir, *options):
    return digest_of(run("train", "digits", *SHORT, "--run-dir", run_dir, *options).stdout())


@pytest.mark.parametrize("options", mostly_long(OPTIONS, 1), ids=" ".join)
def test_any_number_of_workers_gives_the_same_digest(run, nursery, tmp_path, options):
    digests = {train(run, tmp_path / workers, *options, "--workers", workers) for workers in ("1", "3")}
    assert len(digests) == 1, digests
    checkpoints = [contents(tmp_path / workers / "checkpoints") for workers in ("1", "3")]
    assert checkpoints[0] == checkpoints[1]
    assert len(checkpoints[0]) == 4


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_workers_of_torchrun_give_the_same_digest(run, nursery, tmp_path, options):
    digest = train(run, tmp_path / "one", *options, "--workers", "1")
    words = ["train", "digits", *SHORT, *options, "--run-dir", tmp_path / "torchrun"]
    torchrun = nursery.run([*TORCHRUN, *SAMESTEP, *words], tmp_path / "output")
    assert torchrun.wait() == [0], torchrun.stderr()
    assert digest_of(torchrun.stdout()) == digest
    assert contents(tmp_path / "torchrun" / "checkpoints") == contents(tmp_path / "one" / "checkpoints")


@pytest.mark.long
def test_the_command_as_a_user_types_it(run, tmp_path):
    """Each process starts Python, and takes it down at its end."""
    words = ["train", "digits", *SHORT, "--run-dir", tmp_path / "cold", "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, *SAMESTEP, *words], capture_output=True, text=True, timeout=200, env=environment
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert digest_of(finished.stdout) == train(run, tmp_path / "warm", "--workers", "1")


def test_eval_and_digest_work_on_what_train_wrote(run, tmp_path):
    digest = train(run, tmp_path, "--workers", "1")
    assert run("digest", tmp_path).stdout().strip() == digest
    alone = run("eval", tmp_path, "--workers", "1").stdout()
    metric = re.search(r"step 12: test accuracy = 0\.\d{4}$", alone.strip())[0]
    assert metric in run("eval", tmp_path, "--workers", "2").stdout()
    assert metric in run("eval", tmp_path, "--workers", "1", "--weights", "raw").stdout()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--towers", "2", "--workers", "3"], "workers = 3: expected 1 <= workers <= towers = 2"),
        (["--batch-size", "0"], "argument --batch-size: invalid value '0', expected an integer from 1 to"),
    ],
)
def test_wrong_settings_are_one_line(run, tmp_path, options, message):
    finished = run("train", "digits", "--run-dir", tmp_path, *options, expect=2)
    assert len(finished.stderr().splitlines()) == 1
    assert message in finished.stderr()


@pytest.mark.long
def test_another_experiment_in_the_folder_is_refused(run, tmp_path):
    train(run, tmp_path, "--workers", "1")
    words = ["train", "digits", *SHORT, "--seed", "1", "--run-dir", tmp_path, "--workers", "1"]
    finished = run(*words, expect=2)
    assert "was trained with seed = 0, not 1" in finished.stderr()
    assert len(finished.stderr().splitlines()) == 1
