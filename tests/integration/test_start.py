"""Workers of one job that were started with different command lines: one line each, and exit status 2."""

import pytest

PROGRAM = """
import os, sys
from samestep.cli import main
sys.exit(main({words} + {own}[int(os.environ["RANK"])]))
"""


@pytest.fixture
def start_each(nursery, tmp_path):
    """Run `samestep WORDS` with options of its own on each worker; return what each has written."""

    def start_workers(words, *own, **environment):
        program = tmp_path / "program.py"
        words = [*words, *(("--run-dir", str(tmp_path / "run")) if words[0] == "train" else ())]
        program.write_text(PROGRAM.format(words=words, own=[each.split() for each in own]))
        workers = nursery.run([program], tmp_path / "output", len(own), **environment)
        assert workers.wait() == [2] * len(own), [workers.output(rank) for rank in range(len(own))]
        assert not any(workers.stdout(rank) for rank in range(len(own)))
        return [workers.stderr(rank).removeprefix("samestep: error: ") for rank in range(len(own))]

    return start_workers


def test_another_number_of_steps(start_each):
    said = start_each(["train", "digits"], "--steps 20", "--steps 30")
    line = "worker 0 has --steps = 20, worker 1 has --steps = 30"
    assert said == [f"start: {line}: start all workers with the same command line\n"] * 2


def test_an_option_that_is_wrong_on_one(start_each):
    wrong = (
        "argument --steps: invalid value 'x', expected an integer from 1 to 1000000000000; see samestep "
        "train digits --help\n"
    )
    said = start_each(["train", "digits"], "", "--steps x", "")
    assert said == [f"start: worker 1 failed: {wrong}", wrong, f"start: worker 1 failed: {wrong}"]


def test_fewer_towers_than_workers_on_one(start_each):
    said = start_each(["train", "digits"], "--towers 1", "")
    assert said[0].startswith("workers = 2: expected 1 <= workers <= towers")
    assert said[1] == f"start: worker 0 failed: {said[0]}"


def test_a_run_that_one_worker_does_not_see(start_each, run, tmp_path):
    run("train", "digits", "--steps", 1, "--workers", 1, "--run-dir", tmp_path / "run")
    said = start_each(["eval"], str(tmp_path / "run"), str(tmp_path / "nothing"))
    assert said[1].startswith(f"{tmp_path / 'nothing' / 'settings.json'}: not found")
    assert said[0] == f"start: worker 1 failed: {said[1]}"
    said = start_each(["eval", str(tmp_path / "run")], "--weights raw", "")
    line = "worker 0 has --weights = raw, worker 1 has --weights = average"
    assert said == [f"start: {line}: start all workers with the same command line\n"] * 2


def test_a_network_interface_that_is_not_there(start_each):
    said = start_each(["train", "digits"], "", "", GLOO_SOCKET_IFNAME="nope")
    problem = (
        "start of 2 workers: gloo cannot use the network (GLOO_SOCKET_IFNAME = 'nope'): expected the name"
    )
    assert all(line.startswith(problem) and line.count("\n") == 1 for line in said)
