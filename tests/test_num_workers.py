import os

import pytest
import torch

from samestep.app.launching.num_workers import num_cores, resolve_workers
from samestep.errors import ConfigError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_auto_is_a_worker_per_core_and_at_most_one_per_tower(monkeypatch):
    monkeypatch.setattr("samestep.app.launching.num_workers.num_cores", lambda: 6)
    assert resolve_workers("auto", 8, "cpu") == 6
    assert resolve_workers("auto", 4, "cpu") == 4
    assert resolve_workers("auto", 8, "cpu", threads=4) == 1
    assert resolve_workers("auto", 8, "cpu", threads=16) == 1


def test_auto_is_a_worker_per_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert resolve_workers("auto", 8) == 3
    assert resolve_workers("auto", 2, "cuda") == 2


def test_cores_are_those_of_this_process():
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(tmp_path, monkeypatch, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("samestep.app.launching.num_workers._CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert num_cores() == cores


def test_a_number_of_workers_is_taken_as_given():
    assert resolve_workers(5, 8, "cpu") == 5


def test_more_workers_than_towers_are_refused():
    with pytest.raises(ConfigError, match="workers = 9: expected 1 <= workers <= towers = 8"):
        resolve_workers(9, 8, "cpu")


def test_more_workers_than_a_machine_can_start_are_refused(monkeypatch):
    monkeypatch.setattr("samestep.app.launching.num_workers.num_cores", lambda: 2)
    assert resolve_workers(64, 100_000) == 64
    with pytest.raises(ConfigError, match="workers = 100000: expected at most 64, 32 for each core"):
        resolve_workers(100_000, 100_000)


@pytest.mark.parametrize("threads", [0, 100_000])
def test_threads_are_checked_before_anything_is_divided_by_them(threads):
    with pytest.raises(ConfigError, match=f"threads = {threads}: expected 1 <= threads <= 1,024"):
        resolve_workers("auto", 8, "cpu", threads=threads)


def test_under_a_launcher_the_processes_are_counted(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve_workers("auto", 8, "cpu") == resolve_workers(3, 8, "cpu") == 3
    with pytest.raises(ConfigError, match=r"workers = 2, but the launcher started 3 processes"):
        resolve_workers(2, 8, "cpu")
    with pytest.raises(ConfigError, match="workers = 3"):
        resolve_workers("auto", 2, "cpu")
