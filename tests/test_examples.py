"""The programs in examples/ that start their own workers: short, listed, and the same bits on 1, 2 and 3."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import samestep
from samestep.recipes.digits.data import load_digits

from .simulation import values

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL = {
    "contrastive": {"STEPS": 2},
    "gan": {"EPOCHS": 1, "load_digits": lambda: [part[:300] for part in load_digits()]},
    "files": {"STEPS": 3, "PROCESSES": 0},  # the kernel ends them with the thread that started them
    "finetune": {"STEPS": 4, "THAW_AT": 2},
    "language_model": {"STEPS": 2},
}
"""What stands in for a program's own constants and data here."""
MAX_LINES = 80


@pytest.fixture
def main_of(monkeypatch):
    """Return a program's main(job), with fewer steps."""

    def read(name):
        kept = []
        monkeypatch.setattr(samestep, "launch", lambda main, **_: kept.append(main))
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        for constant, value in SMALL[name].items():
            assert hasattr(module, constant)
            monkeypatch.setattr(module, constant, value)
        (main,) = kept
        return main

    return read


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_any_number_of_workers_ends_in_the_same_weights(name, main_of, tmp_path, monkeypatch, capsys):
    main, ends = main_of(name), []
    for num_workers in (1, 2, 3):
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        monkeypatch.chdir(folder)
        values(main, num_workers)
        lines = capsys.readouterr().out.splitlines()
        ends.append([line for line in lines if line.startswith("weights sha256 ") or " = 0." in line])
    assert ends[0]
    assert ends[1:] == ends[:1] * 2


@pytest.mark.long
def test_layers_are_frozen_and_then_thawed(main_of, tmp_path, monkeypatch):
    main, seen = main_of("finetune"), []
    monkeypatch.chdir(tmp_path)
    fit = main.__globals__["train"]

    class Look(samestep.Callback):
        def after_step(self, trainer, report):
            seen.append([parameter.grad is not None for parameter in trainer.model.parameters()])

    def train(*args):
        *args, callbacks = args if len(args) == 6 else (*args, [])
        fit(*args, [*callbacks, Look()])

    monkeypatch.setitem(main.__globals__, "train", train)
    values(main, 1)
    pretrained, tuned = seen[:4], seen[4:]
    assert all(map(all, pretrained))
    assert tuned[0] == tuned[1] == [False] * 8 + [True] * 2
    assert all(tuned[2])
    assert all(tuned[3])


def test_pictures_that_were_not_all_written_are_written_again(main_of, tmp_path, monkeypatch):
    main = main_of("files")
    monkeypatch.chdir(tmp_path)
    write, digits = main.__globals__["write_files"], main.__globals__["load_digits"]

    # Of three pictures, only one has a label.
    monkeypatch.setitem(main.__globals__, "load_digits", lambda: (digits()[0][:3], digits()[1][:1]))
    with pytest.raises(ValueError, match="shorter"):
        write()
    assert not main.__globals__["FOLDER"].exists()
    monkeypatch.setitem(main.__globals__, "load_digits", lambda: [part[:9] for part in digits()])
    write()
    assert len(list(main.__globals__["FOLDER"].glob("*/*/*.png"))) == 9


def test_each_example_is_short_and_listed():
    listed = (ROOT / "docs" / "examples.md").read_text()
    for path in EXAMPLES.glob("*.*"):
        assert f"(../examples/{path.name})" in listed, path.name
        assert len(path.read_text().splitlines()) < MAX_LINES, path.name


# ---- the batch script ------------------------------------------------------------------------------------

SLURM = EXAMPLES / "slurm.sh"

# Stand-ins for Slurm's commands: what they are called with, and a job that ends when it is told to.
COMMANDS = {
    "srun": 'echo "srun $*" >> log; trap "echo checkpoint >> log; exit 1" TERM; echo $$ > step; '
    "for _ in $(seq 600); do [ -e done ] && exit 3; sleep 0.05; done",
    "scancel": 'echo "scancel $*" >> log; kill -TERM "$(cat step)"',
    "scontrol": 'echo "scontrol $*" >> log; echo first',
}


@pytest.fixture
def batch_job(tmp_path):
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2"}
    job = subprocess.Popen(
        ["bash", SLURM],
        cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "step").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    yield job
    (tmp_path / "done").touch()
    job.wait(60)


def test_a_batch_job_that_has_to_go_is_queued_again_after_its_checkpoint(batch_job, tmp_path):
    batch_job.send_signal(signal.SIGTERM)
    batch_job.wait(60)
    hosts, run, *end = (tmp_path / "log").read_text().splitlines()
    assert hosts == "scontrol show hostnames first,second"
    assert run.startswith("srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 7 ")
    assert "--rdzv-endpoint first:29400" in run
    assert end == ["scancel --signal=TERM 7", "checkpoint", "scontrol requeue 7"]


def test_a_batch_job_ends_as_its_program_does(batch_job, tmp_path):
    (tmp_path / "done").touch()
    assert batch_job.wait(60) == 3
    assert "requeue" not in (tmp_path / "log").read_text()


def test_the_batch_script_is_that_of_the_docs():
    assert SLURM.read_text().strip() in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_the_batch_script():
    subprocess.run(["shellcheck", SLURM], check=True)
