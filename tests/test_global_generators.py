"""Loops that draw from the process's global generators, as nanoGPT's does for its batches, stop and go on."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.streams import GlobalStreams, keep_globals, seed_globals

CPU = torch.device("cpu")
TEXT = torch.arange(500) ** 2 % 17
BLOCK, ROWS = 8, 12


@pytest.fixture(autouse=True)
def _global_generators():
    """Leave the global generators to other tests as they were."""
    with keep_globals(CPU):
        yield


def build():
    torch.manual_seed(1337)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Dropout(0.1), nn.Linear(8, 17))
    towers = samestep.Towers(model, 4, seed=1337)
    return {"model": model, "towers": towers, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def get_batch():
    starts = torch.randint(len(TEXT) - BLOCK, (ROWS,))
    if random.random() < 0.5:
        starts = torch.from_numpy(np.random.permutation(starts.numpy()))
    return {
        "x": TEXT[starts[:, None] + torch.arange(BLOCK)],
        "y": TEXT[starts[:, None] + torch.arange(1, BLOCK + 1)],
    }


def train(objects, stop):
    model, towers = objects["model"], objects["towers"]
    while towers.step < stop:
        for tower in towers(get_batch()):
            logits = model(tower.batch["x"])
            tower.backward(F.cross_entropy(logits.flatten(0, 1), tower.batch["y"].flatten()))
        towers.average()
        objects["optimizer"].step()
    return samestep.digest(model)


def resume(path, **options):
    objects = build()
    random.seed(1337)
    np.random.seed(1337)
    samestep.load(path, **objects, **options)
    return train(objects, 9)


@pytest.mark.long
def test_a_loop_that_draws_its_batches_goes_on_in_another_process_with_rng_only(elsewhere, tmp_path):
    random.seed(1337)
    np.random.seed(1337)
    objects = build()
    train(objects, 4)
    samestep.save(tmp_path / "rng", **objects, rng=True)
    samestep.save(tmp_path / "plain", **objects)
    expected = train(objects, 9)
    assert elsewhere(partial(resume, rng=True), tmp_path / "rng") == expected
    assert elsewhere(resume, tmp_path / "plain") != expected


def test_saving_draws_no_numbers(tmp_path):
    seed_globals(3, CPU)
    torch.randn(3)  # an odd count: the other half of a pair is kept
    np.random.randn()
    random.gauss(0, 1)
    before = GlobalStreams.capture(CPU)

    def draw():
        return torch.randn(3).tolist(), random.gauss(0, 1), np.random.randn(3).tolist(), random.random()

    expected = draw()
    before.restore()
    model = nn.Linear(1, 1, device="meta").to_empty(device="cpu")
    path = samestep.save(tmp_path / "one", model=model, rng=True)
    assert draw() == expected
    seed_globals(4, CPU)
    samestep.load(path, model=model, rng=True)
    assert draw() == expected
    assert samestep.load(path, model=model).state == {}
