"""Which backend workers agree on: NCCL wherever each of them has a GPU to itself."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from samestep.workers import default_group
from samestep.workers.device import gpu_of

NCCL = "cpu:gloo,cuda:nccl"


@pytest.fixture(autouse=True)
def _nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def agree(gpus):
    """Let workers with these GPUs meet, each with a connection of its own; return backends and warnings."""
    first = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stores = [first, *(dist.TCPStore("localhost", first.port, is_master=False) for _ in gpus[1:])]

    def meet(rank):
        store = PrefixStore("job", stores[rank])
        return default_group._agree_on_backend(store, gpus[rank], rank, len(gpus))

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(len(gpus)) as workers:
        warnings.simplefilter("always")
        backends = list(workers.map(meet, range(len(gpus))))
    return backends, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["", ""], "gloo"),
        (["a", "b"], NCCL),  # however many of them each sees
        (["a", "b", "c"], NCCL),
        (["a", "", "b"], "gloo"),
        (["", "a"], "gloo"),
    ],
)
def test_all_agree_and_nothing_is_said(gpus, backend):
    assert agree(gpus) == ([backend] * len(gpus), [])


def test_a_pytorch_without_nccl_stays_with_gloo_which_is_said_once(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert agree(["", ""]) == (["gloo"] * 2, [])
    backends, (said,) = agree(["a", "b"])
    assert backends == ["gloo"] * 2
    assert said.startswith("the PyTorch of worker 0 has no NCCL: all gradients travel through host memory")


@pytest.mark.parametrize(
    ("gpus", "who"),
    [
        (["a", "a"], "workers 0 and 1"),
        (["a", "b", "b"], "workers 1 and 2"),
        (["a", "a", "a"], "workers 0, 1 and 2"),
        (["a", "b", "a", "b"], "workers 0 and 2"),
    ],
)
def test_workers_on_one_gpu_stay_with_gloo_which_is_said_once(gpus, who):
    backends, said = agree(gpus)
    assert backends == ["gloo"] * len(gpus)
    assert said == [
        f"{who} share one GPU: all gradients travel through host memory (gloo instead of NCCL); give "
        "each worker a GPU of its own"
    ]


def test_a_gpu_is_told_by_its_uuid(monkeypatch):
    class Properties:
        uuid = 7

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert gpu_of(torch.device("cuda", 0)) == "7"
    assert gpu_of(torch.device("cpu")) == ""
