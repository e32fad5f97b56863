import dataclasses
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import ConfigError
from samestep.workers.environment import rank_environment


def test_without_a_launcher_a_job_is_one_worker():
    job = samestep.init("cpu")
    assert (job.rank, job.world_size, job.device.type, job.threads) == (0, 1, "cpu", 1)
    assert job.is_first
    assert torch.get_num_threads() == 1
    job.barrier()
    job.close()


def test_a_job_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        samestep.init("cpu").rank = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"device": "tpu"}, "device = 'tpu': expected one of auto, cpu, cuda"), ({"threads": 0}, "threads = 0")],
)
def test_settings_out_of_range(arguments, message):
    with pytest.raises(ConfigError, match=message):
        samestep.init(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(ConfigError, match="torch sees no GPU here; use device 'cpu' or 'auto'"):
        samestep.init("cuda")


def test_a_process_group_of_other_workers_than_the_launchers_is_refused(monkeypatch):
    for name, value in rank_environment(1, 2, "127.0.0.1", 29500).items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        message = "is rank 0 of 1 in torch's process group, but the environment has RANK=1, WORLD_SIZE=2"
        with pytest.raises(ConfigError, match=message):
            samestep.init("cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "command",
    [
        "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
        "from multiprocessing.forkserver import main; main(3, 5, ['__main__'], **{})",
        "import sys; from multiprocessing.forkserver import main; main(3, 5, ['__main__'], **{})",  # 3.14
    ],
)
def test_a_child_that_imports_the_script_has_no_job(monkeypatch, capsys, command):
    """A DataLoader's process, say, which multiprocessing has spawned."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", command, "--multiprocessing-fork"])
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("__mp_main__"))
    with pytest.raises(ConfigError, match="imports the script: call it under `if __name__"):
        samestep.init("cpu")
    samestep.launch(print, 2)  # its parent's
    assert capsys.readouterr() == ("", "")
