"""A real job that is stopped: when, with what status and message, and that it goes on with the same bits."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from samestep import Job
from samestep.errors import ConfigError
from samestep.recipes.digits.recipe import DigitsSettings

from ..runs import train
from .nursery import SAMESTEP, SHORT, STEPS, digests_of, steps_of


def stopped_after(workers, tmp_path, reason):
    """Check what is printed and written, and return the step."""
    message = (
        rf"samestep: stopped after step (\d+) by {reason}; checkpoint written; run the same command to con"
    )
    step = int(re.search(message, workers.output())[1])
    assert steps_of(tmp_path / "run")[-1] == step
    assert all("samestep:" not in workers.output(other) for other in range(1, len(workers.pids)))
    return step


@pytest.mark.long
def test_one_signalled_worker_stops_all_and_the_run_goes_on_with_the_same_bits(start, whole, tmp_path):
    for num_workers, step, victim, number in [
        (3, 5, 2, signal.SIGTERM),
        (1, 20, 0, signal.SIGHUP),
        (2, 35, 0, signal.SIGINT),
    ]:
        workers = start(num_workers)
        workers.wait_for_step(step)
        workers.signal(number, victim)
        assert workers.wait() == [128 + number] * num_workers
        assert step <= stopped_after(workers, tmp_path, number.name) <= step + 3
    workers = start(4)
    assert workers.wait() == [0] * 4
    assert digests_of(tmp_path / "run")[STEPS] == whole[STEPS]


@pytest.mark.long
def test_max_seconds_and_checkpoint_minutes(start, whole, tmp_path):
    workers = start(2, "--max-seconds", "0.1", "--checkpoint-minutes", "1e-9")
    assert workers.wait() == [0, 0]
    stopped = stopped_after(workers, tmp_path, "--max-seconds")
    assert stopped < STEPS
    assert steps_of(tmp_path / "run") == list(
        range(max(1, stopped - 2), stopped + 1)
    )  # the three that are kept
    workers = start(1)
    assert workers.wait() == [0]
    assert digests_of(tmp_path / "run")[STEPS] == whole[STEPS]


@pytest.mark.long
def test_signals_to_a_whole_process_tree_and_their_echoes_count_once(start, tmp_path):
    workers = start(3)
    workers.wait_for_step(3)
    for _ in range(3):
        workers.signal(signal.SIGTERM)
    assert workers.wait() == [143] * 3
    stopped_after(workers, tmp_path, "SIGTERM")


@pytest.mark.long
def test_loader_processes_outlive_a_signal_to_the_group_and_end_with_their_worker(start, tmp_path):
    workers = start(2, "--loader-processes", "2", "--steps", "100000", recipe="hanging")
    workers.wait_for_step(2)
    loaders = [pid for worker in range(2) for pid in workers.started_by(worker)]
    assert len(loaders) == 4
    workers.signal_groups(signal.SIGTERM, 1)
    assert workers.wait() == [143] * 2
    stopped_after(workers, tmp_path, "SIGTERM")
    assert_gone(loaders)


@pytest.mark.long
def test_loader_processes_end_with_a_worker_that_is_killed(start):
    workers = start(1, "--loader-processes", "2", "--hang", "loading", recipe="hanging")
    workers.wait_for_step(2)
    loaders = workers.started_by(0)
    workers.signal(signal.SIGKILL)
    assert workers.wait() == [-signal.SIGKILL]
    assert_gone(loaders)


def assert_gone(pids, timeout_s=10):
    deadline_s = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_signal_to_the_launcher_and_its_workers_is_one_message_and_a_checkpoint(nursery, tmp_path):
    words = ["train", "digits", *SHORT, "--steps", "100000", "--workers", "2", "--run-dir", tmp_path / "run"]
    process = nursery.start_program([*SAMESTEP, *words], tmp_path / "output")
    process.wait_for_step(2)
    workers = process.started_by(0)
    assert len(workers) == 2
    process.signal(signal.SIGTERM)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    assert process.wait() == [143]
    step = steps_of(tmp_path / "run")[-1]
    assert process.stderr() == (
        f"samestep: stopped after step {step} by SIGTERM; checkpoint written; "
        "run the same command to continue\n"
    )
    assert_gone(workers)


def test_a_launcher_that_restarts_workers_may_not_start_over(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="--fresh together with torchrun's --max-restarts would start over"):
        train(DigitsSettings(run_dir=tmp_path, fresh=True), Job(torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []
