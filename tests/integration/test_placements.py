"""Every placement takes the same step: real workers over gloo against one process."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import samestep

from . import scenarios

WORKERS = (2, 3, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return, for W workers, what each of them found: run once for each W."""

    @cache
    def run(num_workers: int) -> list[dict[str, dict[str, str]]]:
        out = tmp_path_factory.mktemp("results") / "worker"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_workers}",
        ]
        finished = subprocess.run(
            [*command, scenarios.__file__, str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert finished.returncode == 0, finished.stderr
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(num_workers)]

    return run


@cache
def alone(name: str) -> str:
    return scenarios.SCENARIOS[name](samestep.init("cpu"))


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_same_bits_as_one_worker(results, name, num_workers):
    for found in results(num_workers):
        assert found["results"][name] == alone(name)


MESSAGES = {
    "different_num_towers": "Towers: worker 1 has towers = 7, the others have 8",
    "too_few_towers_on_one": "workers = 3: expected 1 <= workers <= towers = 1",
    "different_model": "Towers: worker 1 has model[0] = 0.weight (32, 7)",
    "different_rows": "step 0: worker 1 has rows = 18, the others have 16",
    "different_values": "step 0: worker 1 has batch fingerprint = ",
    "bad_batch_on_one": "batch['y'] has 5 rows, batch['x'] has 16",
    "bad_batch_on_all": "batch['y'] has 2 rows, batch['x'] has 3",
    "a_step_ahead": "worker 1 has step = 1, the others have 0",
}


@pytest.mark.parametrize("name", scenarios.FAULTS)
def test_all_workers_stop_and_say_who_differs(results, name):
    messages = [found["messages"][name] for found in results(3)]
    for message in messages:
        assert MESSAGES[name] in message
    if name.endswith("_on_one"):
        assert all("worker 1 failed" in messages[worker] for worker in (0, 2))
