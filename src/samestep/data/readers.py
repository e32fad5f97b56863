"""Reads examples into towers' batches, in this process, a thread of it, or a loader process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from samestep.batches.batch import GlobalBatch
from samestep.batches.columns import Whole
from samestep.batches.copier import Copier, copied
from samestep.batches.fingerprint import fingerprint
from samestep.batches.nest import mapped
from samestep.errors import BatchError, UsageError
from samestep.streams import GlobalStreams, seed_globals, stream_seed

__all__ = [
    "BatchedDataset",
    "BatchedReader",
    "Reader",
    "Request",
    "aligned",
    "as_in_a_loader_process",
    "is_batched",
]

_CPU = torch.device("cpu")
_READ_AGAIN_EVERY = 32  # batches
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


@dataclass(frozen=True)
class Request:
    """Some of a worker's towers in one batch, before they are read: the numbers of their examples.

    The k-th time that an epoch holds an example, its number is higher by k times the dataset's length.
    """

    epoch: int
    position: int
    examples: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class Reader(Dataset[dict[int, Any]]):
    """A dataset for DataLoader: its "indices" are requests, its "examples" the towers' batches.

    It holds nothing that changes, so a loader process may read any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: Request) -> dict[int, Any]:
        with as_in_a_loader_process():
            slices = {tower: self._read(request, tower) for tower in request.examples}
        # What a collate_fn returns may be the dataset's own memory, and a pass may write to it.
        own = aligned if self.collate_fn is None else copied
        return {tower: mapped(own, batch) for tower, batch in slices.items()}

    def _read(self, request: Request, tower: int) -> Any:
        numbers = request.examples[tower].tolist()
        rows = [self._example(request.epoch, number) for number in numbers]
        if tower == 0 and request.position % _READ_AGAIN_EVERY == 0:
            self._check_again(request.epoch, numbers[0], rows[0])
        seed_globals(stream_seed(self.seed, "collate", request.position, tower), _CPU)
        return (self.collate_fn or default_collate)(rows)

    def _check_again(self, epoch: int, number: int, row: Any) -> None:
        """Check that an example is the same when it is read again."""
        found = fingerprint(Whole(row))
        if fingerprint(Whole(self._example(epoch, number))) != found:
            raise UsageError(
                f"{type(self.dataset).__name__}: example {number % len(self.dataset)} is another one when it "
                "is read again: expected one that depends on its index, and on torch's, Python's and NumPy's "
                "global generators, which are seeded for it, not on a generator or a counter of the dataset"
            )

    def _example(self, epoch: int, number: int) -> Any:
        example = number % len(self.dataset)
        seed_globals(stream_seed(self.seed, "example", epoch, number), _CPU)
        try:
            return self.dataset[example]
        except Exception as error:
            error.add_note(f"samestep: in example {example} of the dataset")
            raise


@dataclass(frozen=True)
class BatchedReader(Dataset[dict[int, Any]]):
    """The same for a `BatchedDataset`: one call reads all rows of a request, which are then copied apart.

    It leaves all global state alone, so it may run in a thread beside the passes.
    """

    dataset: BatchedDataset
    seed: int

    def __getitem__(self, request: Request) -> dict[int, Any]:
        numbers = np.concatenate(list(request.examples.values()))
        seeds = [stream_seed(self.seed, "example", request.epoch, int(number)) for number in numbers]
        examples = numbers % len(self.dataset)
        batch = GlobalBatch.open(self.dataset.batch(examples, np.array(seeds, dtype=np.uint64)))
        if batch.rows != len(examples):
            raise BatchError(
                f"{type(self.dataset).__name__}.batch returned {batch.rows} rows for {len(examples)} "
                "examples: expected one each"
            )
        starts = np.cumsum([0, *(len(rows) for rows in request.examples.values())]).tolist()
        parts = zip(request.examples, starts[:-1], starts[1:], strict=True)
        copier = Copier(_CPU)
        return {tower: batch.take(range(start, stop), copier) for tower, start, stop in parts}


@contextmanager
def as_in_a_loader_process() -> Iterator[None]:
    """Read with one thread, as DataLoader's processes do, and leave the global generators as they were."""
    streams, threads = GlobalStreams.capture(_CPU), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        streams.restore()


def aligned(value: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
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
