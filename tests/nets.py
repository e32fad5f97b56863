"""A small classifier, its batches, its loss and its step, for programs that are written around them."""

import queue

import torch
import torch.nn.functional as F
from torch import nn


def batch_of(step, rows=21):
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(rows, 6, generator=generator),
        "y": torch.randint(3, (rows,), generator=generator),
    }


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def run_passes(towers, batch, loss=loss_of):
    for tower in towers(batch):
        tower.backward(loss(towers.model, tower.batch))


def take_step(towers, batch, loss=loss_of):
    run_passes(towers, batch, loss)
    return towers.average()


def sparse_tensor(rows, values, shape, **known):
    # With `check_invariants=True` torch 2.11 and 2.12 warn: https://github.com/pytorch/pytorch/pull/183256
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, shape, **known)


def unseen_count(start=0):
    """Return a function that counts its calls, which source code that calls it does not show."""
    numbers = queue.SimpleQueue()
    for number in range(start, start + 1000):
        numbers.put(number)
    return numbers.get
