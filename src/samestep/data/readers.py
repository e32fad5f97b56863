"""Reads examples into towers' batches, in this process, a thread of it, or a loader process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from samestep.errors import BatchError
from samestep.streams import GlobalStreams, seed_globals, stream_seed
from samestep.towers.batch import GlobalBatch
from samestep.towers.copier import Copier, copied
from samestep.towers.nest import mapped

__all__ = [
    "BatchedDataset",
    "BatchedReader",
    "Reader",
    "Request",
    "is_batched",
]

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that makes many examples in one call.

    Each row must depend on its own example and seed alone, whatever else is in the call: see
    `samestep.streams.uniforms` for such random numbers. `batch` may run in a thread beside the passes.

    Example:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 5
        ...     def batch(self, examples, seeds):
        ...         return torch.from_numpy(examples**2)
        >>> from samestep import TowerLoader, Towers
        >>> towers = Towers(torch.nn.Linear(1, 1), 2)
        >>> next(iter(TowerLoader(Squares(), 5, towers, shuffle=False))).slices
        {0: tensor([0, 1, 4]), 1: tensor([ 9, 16])}
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Any:
        """Return some examples.

        Args:
            examples: their indices, int64 [n].
            seeds: one for each, uint64 [n], from (seed, epoch, example).

        Returns:
            Nested tensors with n rows each, in the order of `examples`.
        """


@dataclass(frozen=True, eq=False)
class Request:
    """The rows of one tower in one batch, before they are read: the numbers of its examples."""

    epoch: int
    position: int
    tower: int
    examples: NDArray[np.int64]

    @property
    def place(self) -> tuple[int, int]:
        """Where it comes in the order in which a worker's slices are read."""
        return self.position, self.tower


@dataclass(frozen=True)
class Reader(Dataset[Any]):
    """A dataset for DataLoader: its "indices" are requests, its "examples" a tower's batch each.

    It holds nothing that changes, so a loader process may read any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: Request) -> Any:
        with _as_in_a_loader_process():
            rows = [self._example(request.epoch, int(example)) for example in request.examples]
            seed_globals(stream_seed(self.seed, "collate", request.position, request.tower), _CPU)
            batch = (self.collate_fn or default_collate)(rows)
        return mapped(_aligned, batch)

    def _example(self, epoch: int, example: int) -> Any:
        seed_globals(stream_seed(self.seed, "example", epoch, example), _CPU)
        return self.dataset[example]


@dataclass(frozen=True)
class BatchedReader(Dataset[Any]):
    """The same for a `BatchedDataset`: one call reads a tower's rows.

    It leaves all global state alone, so it may run in a thread beside the passes.
    """

    dataset: BatchedDataset
    seed: int

    def __getitem__(self, request: Request) -> Any:
        seeds = [stream_seed(self.seed, "example", request.epoch, int(each)) for each in request.examples]
        batch = self.dataset.batch(request.examples, np.array(seeds, dtype=np.uint64))
        whole = GlobalBatch.open(batch)
        if whole.rows != len(request.examples):
            raise BatchError(
                f"{type(self.dataset).__name__}.batch returned {whole.rows} rows for "
                f"{len(request.examples)} examples: expected one each"
            )
        return whole.take(range(whole.rows), Copier(_CPU))


@contextmanager
def _as_in_a_loader_process() -> Iterator[None]:
    """Read with one thread, as DataLoader's processes do, and leave the global generators as they were."""
    streams, threads = GlobalStreams.capture(_CPU), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        streams.restore()


def _aligned(value: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    """Move a tensor or array to memory that starts at the same alignment in every process.

    Kernels may choose by alignment, and arrays from NumPy start where torch's own would not.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            return value
        address = value.data_ptr()
    else:
        address = value.ctypes.data
    return copied(value) if address % _ALIGNMENT_BYTES else value


def is_batched(dataset: object) -> bool:
    """Say whether a dataset is a `BatchedDataset`."""
    # Hugging Face's datasets have a method `batch` too, which does something else.
    return isinstance(dataset, BatchedDataset) and "seeds" in inspect.signature(dataset.batch).parameters
