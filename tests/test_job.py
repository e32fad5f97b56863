import dataclasses

import pytest
import torch

import samestep
from samestep.errors import ConfigError


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
