"""What is set for a GPU, as far as can be seen without one."""

import pytest
import torch
from torch import nn

import samestep
from samestep.app import recipe_check
from samestep.identity import digest, precisions
from samestep.workers.device import make_cuda_deterministic

from .simulation import values

pytestmark = pytest.mark.sampled(5)


def set_for_a_gpu(before, wanted):
    torch.backends.fp32_precision = before  # what a program set
    torch.cuda.set_device = lambda device: None
    make_cuda_deterministic(torch.device("cuda", 0), tf32=wanted == "tf32")
    return [
        precisions(torch.backends.cuda, torch.backends.cudnn),
        (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        torch.utils.deterministic.fill_uninitialized_memory,
    ]


@pytest.mark.long
@pytest.mark.parametrize(("before", "wanted"), [("tf32", "ieee"), ("none", "tf32")])
def test_tf32_is_what_was_asked_for_by_both_interfaces(elsewhere, before, wanted):
    of_all = ", ".join(f"{kind} {wanted}" for kind in ("matmul", "conv", "rnn"))
    is_on = wanted == "tf32"
    assert elsewhere(set_for_a_gpu, before, wanted) == [of_all, (is_on, is_on), (True, False), False]


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tf32_without_a_gpu_is_a_warning(device):
    with pytest.warns(UserWarning, match="tf32=True has no effect on cpu: expected a GPU from Ampere on"):
        samestep.init(device, tf32=True)


# ---- memory that is not filled -------------------------------------------------------------------------


def train(job):
    """Train a few steps in which all kinds of messages travel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten(), nn.Linear(10, 3), nn.BatchNorm1d(3))
    towers = samestep.Towers(model, 3, job=job, noise_every=2, bucket_bytes=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        batch = torch.randint(9, (13, 2), generator=torch.Generator().manual_seed(step))
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()
    towers.whole_batch(batch, model, lambda outputs, _: torch.cdist(outputs, outputs).mean())
    towers.average()
    optimizer.step()
    return digest(model)


@pytest.fixture
def filled(monkeypatch):
    """Let every torch.empty be filled, with NaN where it can."""
    samestep.init("cpu")
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_no_memory_is_read_before_it_is_written_to(num_workers, filled):
    with_nan = values(train, num_workers)
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert with_nan == values(train, num_workers)
    assert len(set(with_nan)) == 1


def test_a_check_of_a_recipe_computes_as_the_recipe_does(monkeypatch):
    class Experiment:
        step, loader = "step", ()

    class Settings:
        tf32 = True

        def build(self, job):
            return Experiment

    chosen = []
    monkeypatch.setattr(recipe_check, "set_tf32", chosen.append)
    for device in ("cpu", "cuda"):
        step, _ = recipe_check._Recipe(Settings())(samestep.Job(torch.device(device)))
        assert step == "step"
    assert chosen == [True]
