"""Every placement takes the same step: real workers over gloo against one process."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import samestep

from . import placements

ROOT = Path(__file__).parents[2]


def run_program(nursery, program, out, num_workers, *arguments):
    """Run a module that writes OUT.N as worker N, and return what each of them found."""
    command = ("-m", program.__name__, out, *arguments)
    finished = nursery.run(command, out.with_suffix(".output"), num_workers)
    assert finished.wait() == [0] * num_workers, finished.stderr()
    return found_by(num_workers, out)


def run_torchrun(program, out, num_workers, *arguments):
    """As `run_program`; but each process starts Python, and so has an order of its own for sets."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"]
    finished = subprocess.run(
        [sys.executable, *launcher, "--module", program.__name__, str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    return found_by(num_workers, out)


def found_by(num_workers, out):
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(num_workers)]


@pytest.fixture(scope="module")
def results(nursery, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")

    def run(num_workers):
        if num_workers == 2:
            return run_torchrun(placements, folder / "torchrun", 2)
        return run_program(nursery, placements, folder / str(num_workers), num_workers)

    return cache(run)


@cache
def alone(name: str) -> str:
    return placements.SCENARIOS[name](samestep.init("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", placements.SCENARIOS)
def test_same_bits_as_one_worker(results, name, num_workers):
    for found in results(num_workers):
        assert found[name] == alone(name)


MESSAGES = {
    "different_num_towers": "Towers: worker 1 has towers = 7, the others have 8",
    "too_few_towers_on_one": "workers = 3: expected 1 <= workers <= towers = 1",
    "different_model": "Towers: worker 1 has layer 2 = Linear, the others have Dropout",
    "different_policies_for_buffers": "Towers: worker 1 has buffer policies[0] = ('codes', 'first'), the",
    "buffers_without_a_policy": "changed codes, queue, seen, scale, which has no policy: choose one, such",
    "different_rows": "step 0: worker 1 has rows = 18, the others have 16",
    "different_values": "step 0: worker 1 has batch fingerprint = ",
    "bad_batch_on_one": "batch['y'] has 5 rows, batch['x'] has 16",
    "bad_pictures_on_one": "batch['y'] has 5 rows, batch['x'] has 14",
    "bad_batch_on_one_with_counts": "batch['y'] has 5 rows, batch['x'] has 16",
    "bad_count_on_one": "tower 3: the count of kept is -1, expected a finite number of at least 0",
    "sparse_gradient_on_worker_1": "step 0: table got a sparse gradient, which was not expected: list",
    "different_sparse_parameters": "Towers: worker 1 has trained parameter linear.weight = (5, 7) strides",
    "sparse_parameter_of_another_model_on_one": "sparse_parameters[0] is not a parameter of Table that",
    "bad_texts_on_one": "batch['y'] has 5 rows, batch['x'] has 16",
    "bad_batch_on_all": "batch['y'] has 2 rows, batch['x'] has 3",
    "a_wrong_label_map": "labels/b.png: label 7 in row 0, column 0 (and in 19 more pixels), expected 0 to 3",
    "no_checkpoint_on_worker_0": "MissingFileError: nowhere: does not exist; expected a checkpoint",
    "saved_without_towers": "ConfigError: towers is missing: there are several workers, so pass towers=",
    "saved_to_a_disk_without_room": "(File too large); raise the limit on file sizes",
    "saved_with_state_that_cannot_be_written": "ConfigError: thing is a object: a checkpoint holds",
    "generators_that_differ_on_one": "worker 1 failed, and has Python's random = state ",
    "state_that_cannot_be_loaded_on_one": "its state of thing does not fit (ArithmeticError: not today)",
    "a_model_that_does_not_fit_on_one": "does not fit the model",
    "a_step_ahead": "worker 1 has step = 1, the others have 0",
    "first_pass_fails_on_one": "MemoryError: out of memory",
    "loss_fails_on_one": "MemoryError: out of memory",
    "second_pass_fails_on_one": "MemoryError: out of memory",
    "loss_fails_on_all": "ZeroDivisionError: ",
    "outputs_that_differ": "step 0: forward returned different outputs for towers 0 and 2 (tensor 0: float32",
    "whole_batch_a_step_ahead": "worker 1 has step = 1, the others have 0",
}


@pytest.fixture(scope="module")
def faults(nursery, tmp_path_factory):
    return run_program(nursery, placements, tmp_path_factory.mktemp("faults") / "3", 3, "faults")


@pytest.mark.parametrize("name", placements.FAULTS)
def test_all_workers_stop_and_say_who_differs(faults, name):
    messages = [found[name] for found in faults]
    for message in messages:
        assert MESSAGES[name] in message
    if name.endswith("_on_one"):
        told = ("worker 1 failed", "worker 1 abandoned the step after MemoryError")
        assert all(any(each in messages[worker] for each in told) for worker in (0, 2))


@pytest.mark.gpu
def test_same_bits_on_a_gpu_for_one_and_several_workers(tmp_path):
    """More workers than GPUs share one, and talk through host memory; as many as GPUs use NCCL."""
    (alone_there,) = run_torchrun(placements, tmp_path / "one", 1, "scenarios", "cuda")
    for num_workers in (2, 3):
        for found in run_torchrun(placements, tmp_path / f"{num_workers}", num_workers, "scenarios", "cuda"):
            assert found == alone_there
