"""The order of an epoch: the indices of its examples, from a function of seed and epoch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import ConfigError
from samestep.streams import keep_globals, seed_globals, stream_seed

__all__ = ["REPEAT", "CustomOrder", "Order", "indices_of", "numbered"]

REPEAT = 1 << 40
"""What is added to an example's number for each time that it has come before in an epoch."""

Order: TypeAlias = Callable[[int, int], Any]
"""order(seed, epoch) -> indices of examples: a tensor, an array, or an iterable of ints such as a sampler."""

_CPU = torch.device("cpu")


def indices_of(order: Order, seed: int, epoch: int, num_examples: int) -> NDArray[np.int64]:
    """Return an epoch's indices, int64 [n]; while `order` runs, (seed, epoch) seeds the global generators.

    Raises:
        ConfigError: `order` returns no indices, or something other than integers in range.
    """
    with keep_globals(_CPU):
        seed_globals(stream_seed(seed, "order", epoch), _CPU)
        found = order(seed, epoch)
        if isinstance(found, Tensor):
            found = found.cpu().numpy()
        indices = np.asarray(found if isinstance(found, np.ndarray) else list(found))
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        what = f"{indices.dtype} {list(indices.shape)}" if indices.size else "no indices"
        raise ConfigError(f"order({seed}, {epoch}) gives {what}: expected int64 [n], indices of examples")
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if len(wrong):
        raise ConfigError(
            f"order({seed}, {epoch}) gives the index {wrong[0]}: expected 0 to "
            f"{num_examples - 1}, as the dataset has {num_examples} examples"
        )
    return indices.astype(np.int64)


@dataclass(frozen=True)
class CustomOrder:
    """A user's order, with the size and checksum of its epoch 0."""

    order: Order
    seed: int
    num_rows: int  # of epoch 0
    checksum: int

    @classmethod
    def check(cls, order: Order, seed: int, num_examples: int) -> CustomOrder:
        """Call `order` twice for epoch 0, and check that the indices are the same.

        Raises:
            ConfigError: they differ, `order` is not callable, or as for `indices_of`.
        """
        if not callable(order):
            raise ConfigError(
                f"order is a {type(order).__name__}: expected a function order(seed, epoch) -> indices"
            )
        first, again = (indices_of(order, seed, 0, num_examples) for _ in range(2))
        if not np.array_equal(first, again):
            raise ConfigError(
                f"order({seed}, 0) gives different indices when it is called again: expected a function of "
                "only seed and epoch, which may draw from the global generators, but not from one that it "
                "keeps"
            )
        return cls(order, seed, len(first), zlib.crc32(first.tobytes()))

    def __call__(self, epoch: int, num_examples: int) -> NDArray[np.int64]:
        """Return an epoch's indices, int64 [n], of the examples that there are now."""
        return indices_of(self.order, self.seed, epoch, num_examples)


def numbered(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return index + k · `REPEAT` for the k-th occurrence (from 0) of an example in an epoch.

    The numbers are unique, so each occurrence gets its own random stream. They do not depend on the length of
    the dataset, which may grow.

    >>> numbered(np.array([3, 1, 3])) % REPEAT
    array([3, 1, 3])
    >>> numbered(np.array([3, 1, 3])) // REPEAT
    array([0, 0, 1])
    """
    by_example = np.argsort(indices, kind="stable")
    _, starts, counts = np.unique(indices[by_example], return_index=True, return_counts=True)
    repeats = np.empty_like(indices)
    repeats[by_example] = np.arange(len(indices)) - np.repeat(starts, counts)
    return indices + repeats * REPEAT
