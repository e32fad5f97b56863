"""A script with a trainer that starts its own workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import samestep

from ..cases import mostly_long
from ..test_trainer import trainer_of

SCRIPT = """
import sys

import samestep
from tests.test_trainer import trainer_of


def main(job):
    if "fail" in sys.argv and job.rank == 1:
        raise samestep.ConfigError("no such thing")
    trainer_of(job, sys.argv[2]).run()


samestep.launch(main, int(sys.argv[1]), towers=7)
"""


def run_script(nursery, tmp_path, *words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return nursery.run([script, *words], tmp_path / "output")


def test_a_script_starts_its_workers(nursery, tmp_path):
    done = run_script(nursery, tmp_path, 2, tmp_path / "run")
    assert (done.wait(), done.stderr()) == ([0], "")
    alone = trainer_of(samestep.Job(torch.device("cpu")), tmp_path / "alone").run()
    assert re.findall(r"^weights sha256 (\w+)$", done.stdout(), re.M) == [alone.digest]
    assert "7 towers on 2 workers (cpu), batches of 10 rows" in done.stdout()


def test_an_error_of_one_worker_ends_a_script_in_one_line(nursery, tmp_path):
    done = run_script(nursery, tmp_path, 2, tmp_path / "run", "fail")
    assert (done.wait(), done.stdout(), done.stderr()) == ([2], "", "samestep: error: no such thing\n")


ANEW = """
import os

import samestep


def main(job):
    again = samestep.init("cpu")
    found = again.rank == job.rank, again.world_size, "SAMESTEP_NUMBER" in os.environ
    print(f"{found}\\n", end="")  # in one piece, as both print at once


samestep.launch(main, 2)
"""


def test_a_script_may_ask_for_its_job_again_and_start_others(nursery, tmp_path):
    """What it starts must not take its number for a place in a job of its own."""
    script = tmp_path / "script.py"
    script.write_text(ANEW)
    done = nursery.run([script], tmp_path / "output")
    assert (done.wait(), done.stdout(), done.stderr()) == ([0], "(True, 2, False)\n" * 2, "")


LEAVING = """
import os
import signal
import sys

import torch.distributed as dist

import samestep
from tests.nets import batch_of, net, take_step


def main(job):
    towers = samestep.Towers(net(), 7, job=job)
    take_step(towers, batch_of(0))
    if "destroy" in sys.argv:
        dist.destroy_process_group()
        return
    if job.rank == 1:
        if "exit" in sys.argv or "status" in sys.argv:
            sys.exit("no more data" if "exit" in sys.argv else 3)
        os.kill(os.getpid(), signal.SIGINT)
    take_step(towers, batch_of(1))


samestep.launch(main, 2)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "status", "line"),
    [
        ("interrupt", 130, "samestep: worker 1 of 2 was interrupted by SIGINT; the job was stopped\n"),
        ("exit", 1, "no more data\nsamestep: worker 1 of 2 failed; the job was stopped\n"),
        ("status", 3, "samestep: worker 1 of 2 exited with status 3; the job was stopped\n"),
        ("destroy", 0, ""),
    ],
)
def test_how_one_worker_left_is_told_in_a_line(nursery, tmp_path, how, status, line):
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    done = nursery.run([script, how], tmp_path / "output")
    assert (done.wait(), done.stdout(), done.stderr()) == ([status], "", line)


TWICE = """
import samestep


def main(job, word):
    print(f"{word} {job.rank} of {job.world_size}\\n", end="")  # in one piece, as both print at once


for word in ("one", "two"):
    samestep.launch(lambda job: main(job, word), 2)
print("after")
"""


def test_a_script_may_launch_twice_and_go_on(nursery, tmp_path):
    """Each call has workers of its own; what follows them is for the first process alone."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    done = nursery.run([script], tmp_path / "output")
    assert (done.wait(), done.stderr()) == ([0], "")
    *first, last = done.stdout().splitlines()
    assert sorted(first) == ["one 0 of 2", "one 1 of 2", "two 0 of 2", "two 1 of 2"]
    assert last == "after"


FORKING = """
import os
import sys
import warnings

import samestep


def main(job):
    warnings.simplefilter("ignore")  # of a fork beside threads
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print(f"{os.waitpid(child, 0)[1]}\\n", end="")


samestep.launch(main, 2)
"""


def test_a_process_that_a_worker_forks_ends_by_itself(nursery, tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    done = nursery.run([script], tmp_path / "output")
    assert (done.wait(), done.stdout(), done.stderr()) == ([0], "0\n" * 2, "")


DRAWING = """
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import samestep
from tests.integration.sent_away import Left

torch.seed()  # or all of them would be copies of one process that has drawn


def main(job):
    died, left = Path(sys.argv[1]) / "died", Left()
    print(f"{random.random()} {np.random.rand()} {torch.rand(())}\\n", end="", flush=True)
    model = nn.Linear(1, 1)
    towers = samestep.Towers(model, 5, job=job, noise_every=0)

    def step():
        for tower in towers(torch.ones(5, 1)):
            tower.backward(model(tower.batch).square().mean())
        if job.rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        towers.average()

    with samestep.Elastic(model=model, towers=towers, left=left) as elastic:
        while left.steps:
            elastic(step)
            time.sleep(0.01)
            left.steps -= job.world_size == 3 and died.exists()


samestep.launch(main, 3, towers=5, device="cpu")
"""


@pytest.mark.long
def test_workers_and_newcomers_draw_alike_from_the_start(nursery, tmp_path):
    """None of them has a seed, so that what each builds would be another net."""
    script = tmp_path / "drawing.py"
    script.write_text(DRAWING)
    done = nursery.run([script, tmp_path], tmp_path / "output")
    assert done.wait() == [0], done.stderr()
    drawn = done.stdout().splitlines()
    assert len(drawn) == 4
    assert len(set(drawn)) == 1


SPAWNING = """
import sys

import torch.distributed as dist
import torch.multiprocessing as mp

import samestep
from tests.nets import batch_of, net, take_step


def train(job):
    model = net()
    towers = samestep.Towers(model, 7, job=job)
    take_step(towers, batch_of(0))
    print(f"{job.rank} of {job.world_size}: {samestep.digest(model)}\\n", end="")


def work(rank, num_workers, file, how):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=num_workers)
    if how == "launch":
        samestep.launch(train, 5)
    elif how == "init":
        train(samestep.init("cpu"))
    else:
        job = samestep.init("cpu")
        train(job)
        job.close()
        dist.barrier()
        train(samestep.init("cpu"))
        dist.destroy_process_group()


mp.start_processes(work, (int(sys.argv[1]), *sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("how", mostly_long(["launch", "close", "init"], 2))
def test_workers_that_have_made_a_process_group_are_those_of_the_job(nursery, tmp_path, how):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    digests = set()
    for num_workers in (1, 2, 3):
        if how == "launch" and num_workers == 1:  # nobody has started workers then
            continue
        # A group that the program has made is still there when the job is closed.
        words = [script, num_workers, tmp_path / f"group-{num_workers}", how]
        done = nursery.run(words, tmp_path / f"output-{num_workers}")
        assert (done.wait(), done.stderr()) == ([0], "")
        found = dict(line.split(": ") for line in done.stdout().splitlines())
        assert sorted(found) == [f"{rank} of {num_workers}" for rank in range(num_workers)]
        digests |= set(found.values())
    assert len(digests) == 1


CLOSING = """
import sys

import samestep
from tests.nets import batch_of, net, take_step


def main(job):
    other = samestep.init("cpu")
    towers = samestep.Towers(net(), 7, job=job)
    take_step(towers, batch_of(0))
    job.close()
    if "again" in sys.argv:
        job.close()
    elif "other" in sys.argv:
        other.close()
    elif "save" in sys.argv:
        samestep.save(sys.argv[3], model=towers.model, towers=towers)
    else:
        take_step(towers, batch_of(1))


samestep.launch(main, int(sys.argv[1]))
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "line"),
    mostly_long(
        [
            ("step", "step 1: the job was closed: expected job.close() as the last call"),
            ("save", "this worker has left the job: expected job.close() as the last call"),
            ("again", None),
            ("other", None),
        ],
        2,
    ),
)
def test_a_job_that_was_closed_takes_no_step(nursery, tmp_path, how, line):
    script = tmp_path / "closing.py"
    script.write_text(CLOSING)
    for num_workers in (2, 3) if how == "save" else (1, 2, 3):
        done = nursery.run([script, num_workers, how, tmp_path / "saved"], tmp_path / f"output-{num_workers}")
        if line is None:
            assert (done.wait(), done.stderr()) == ([0], "")
        else:
            assert done.wait() == [1]
            assert done.stderr().count("\n") == 1
            assert f"{line}\n" in done.stderr()


LOADING = """
import samestep
from tests.nets import batch_of, loss_of, net


def main(job):
    model = net()
    towers = samestep.Towers(model, 7, job=job)
    rows = [{name: values[row] for name, values in batch_of(0).items()} for row in range(14)]
    loader = samestep.TowerLoader(rows, 14, towers, num_workers=1, multiprocessing_context="spawn")
    for batch in loader:
        for tower in towers(batch):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
    print(f"took step {towers.step}")


samestep.launch(main, 1)
"""


@pytest.mark.slow
def test_loader_processes_that_import_the_script_launch_nothing(tmp_path):
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    folders = os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "took step 1\n", "")
