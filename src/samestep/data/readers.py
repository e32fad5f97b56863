"""Reads examples into towers' batches, in this process, in a thread of it, or in a loader process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from samestep.arguments import parameters_of
from samestep.batches.batch import GlobalBatch
from samestep.batches.columns import Whole
from samestep.batches.copier import Copier, copied
from samestep.batches.fingerprint import fingerprint
from samestep.batches.nest import PLAIN, entries, mapped
from samestep.data.order import REPEAT
from samestep.data.shards import seen_as
from samestep.errors import BatchError, UsageError
from samestep.streams import GlobalStreams, seed_globals, stream_seed

__all__ = [
    "COMPARED",
    "BatchedDataset",
    "BatchedReader",
    "Reader",
    "Request",
    "aligned",
    "as_in_a_loader_process",
    "compared_at",
    "is_batched",
]

COMPARED = -1
"""The key, beside the towers' indices, of the number that all workers compare."""

_CPU = torch.device("cpu")
_COMPARE_EVERY = 32  # batches
_ALIGNMENT_BYTES = 64


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that returns many examples in one call.

    Each row must depend on its own example and seed alone, not on the other rows in the call;
    `samestep.streams.uniforms` gives such random numbers. `batch` may run in a thread during the passes.

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
            seeds: a seed for each, from (seed, epoch, example), uint64 [n].

        Returns:
            Nested tensors with n rows each, in the order of `examples`.
        """


@dataclass(frozen=True)
class Request:
    """The examples to read for some of a worker's towers in one batch, as numbers from `samestep.data.order`.

    The k-th occurrence (from 0) of an example in an epoch has the number index + k · `REPEAT`. `compared`
    is the number of an example that all workers read and compare; None to compare none.
    """

    epoch: int
    position: int
    examples: Mapping[int, NDArray[np.int64]]
    compared: int | None = None


def compared_at(position: int, rows: NDArray[np.int64]) -> int | None:
    """Return the first example of every 32nd batch, for all workers to read and compare; else None."""
    return int(rows[0]) if position % _COMPARE_EVERY == 0 else None


@dataclass(frozen=True)
class Reader(Dataset[dict[int, Any]]):
    """A dataset for DataLoader, with requests as its "indices" and towers' batches as its "examples".

    It has no mutable state, so a loader process may read any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: Request) -> dict[int, Any]:
        with as_in_a_loader_process():
            first: int | None = None
            slices: dict[int, Any] = {}
            for tower, numbers in request.examples.items():
                rows = [self._example(request.epoch, number) for number in numbers.tolist()]
                is_compared = tower == 0 and request.compared is not None
                first = fingerprint(Whole(rows[0])) if is_compared else first
                slices[tower] = self._collated(rows, request.position, tower, twice=is_compared)
            number = self._compared(request, first)
        # A collate_fn may return the dataset's own memory, and a pass may write to it.
        own = aligned if self.collate_fn is None else copied
        return number | {tower: mapped(own, batch) for tower, batch in slices.items()}

    def _collated(self, rows: list[Any], position: int, tower: int, *, twice: bool) -> Any:
        """Collate a tower's rows; if `twice`, check that a second call gives the same batch."""
        seed = stream_seed(self.seed, "collate", position, tower)
        if self.collate_fn is None or not twice or not _is_copied_whole(rows):
            with self._seeded(seed):
                return (self.collate_fn or default_collate)(rows)
        same = [mapped(copied, row) for row in rows]  # a collate_fn may write to them
        found = []
        for each in (same, rows):
            with self._seeded(seed):
                found.append(self.collate_fn(each))
        if fingerprint(Whole(found[0])) != fingerprint(Whole(found[1])):
            raise UsageError(
                "collate_fn makes a different batch of the same examples when it is called again: expected "
                "it to depend only on them, and on torch's, Python's and NumPy's global generators, which "
                "are seeded for it, not on a generator or a counter that it keeps"
            )
        return found[1]

    def _compared(self, request: Request, first: int | None) -> dict[int, int]:
        """Return the fingerprint of the compared example; check it against `first`, if tower 0 was read."""
        if request.compared is None:
            return {}
        number = fingerprint(Whole(self._example(request.epoch, request.compared)))
        if first not in (None, number):
            example = request.compared % REPEAT
            raise UsageError(
                f"{type(self.dataset).__name__}: example {example} is different when it is read again: "
                "expected it to depend only on its index, and on torch's, Python's and NumPy's global "
                "generators, which are seeded for it, not on a generator or a counter of the dataset"
            )
        return {COMPARED: number}

    def _example(self, epoch: int, number: int) -> Any:
        example = number % REPEAT
        try:
            with self._seeded(stream_seed(self.seed, "example", epoch, number)):
                return self.dataset[example]
        except Exception as error:
            error.add_note(f"samestep: in example {example} of the dataset")
            raise

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """Seed the global generators, and in a loader process what `get_worker_info` returns."""
        seed_globals(seed, _CPU)
        worker = get_worker_info()
        # Elsewhere it stays None: torch's default_collate uses shared memory if it is anything else.
        if worker is not None:
            worker = WorkerInfo(id=worker.id, num_workers=worker.num_workers, seed=seed, dataset=self.dataset)
        with seen_as(worker):
            yield


@dataclass(frozen=True)
class BatchedReader(Dataset[dict[int, Any]]):
    """A `Reader` for a `BatchedDataset`: one call reads all rows of a request, which are then split by tower.

    It touches no global state, so it may run in a thread during the passes.
    """

    dataset: BatchedDataset
    seed: int

    def __getitem__(self, request: Request) -> dict[int, Any]:
        slices = self._read(request) if request.examples else {}
        if request.compared is None:
            return slices
        first = self._batch(request.epoch, np.array([request.compared]))
        return {COMPARED: fingerprint(first.root), **slices}

    def _batch(self, epoch: int, numbers: NDArray[np.int64]) -> GlobalBatch:
        seeds = [stream_seed(self.seed, "example", epoch, int(number)) for number in numbers]
        examples = numbers % REPEAT
        batch = GlobalBatch.open(self.dataset.batch(examples, np.array(seeds, dtype=np.uint64)))
        if batch.rows != len(examples):
            raise BatchError(
                f"{type(self.dataset).__name__}.batch returned {batch.rows} rows for {len(examples)} "
                "examples: expected one each"
            )
        return batch

    def _read(self, request: Request) -> dict[int, Any]:
        batch = self._batch(request.epoch, np.concatenate(list(request.examples.values())))
        starts = np.cumsum([0, *(len(rows) for rows in request.examples.values())]).tolist()
        parts = zip(request.examples, starts[:-1], starts[1:], strict=True)
        copier = Copier(_CPU)
        return {tower: batch.take(range(start, stop), copier) for tower, start, stop in parts}


def _is_copied_whole(rows: list[Any]) -> bool:
    """Whether rows are nests of tensors, arrays and plain values, so that copies share no memory."""

    def is_nest(value: Any) -> bool:
        if isinstance(value, (Tensor, np.ndarray, *PLAIN)):
            return True
        held = entries(value)
        return held is not None and all(map(is_nest, held.values()))

    try:
        return all(map(is_nest, rows))
    except RecursionError:  # a row holds itself
        return False


@contextmanager
def as_in_a_loader_process() -> Iterator[None]:
    """Use one CPU thread, as DataLoader's processes do, and restore the global generators afterwards."""
    streams, threads = GlobalStreams.capture(_CPU), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        streams.restore()


def aligned(value: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    """Return a tensor or array in aligned memory; copy it if need be.

    Kernels may be chosen by alignment, and NumPy aligns its memory differently from torch.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            return value
        address = value.data_ptr()
    else:
        address = value.ctypes.data
    return copied(value) if address % _ALIGNMENT_BYTES else value


def is_batched(dataset: object) -> bool:
    """Return whether a dataset is a `BatchedDataset`."""
    # Hugging Face's datasets have an unrelated method `batch`.
    return isinstance(dataset, BatchedDataset) and "seeds" in parameters_of(dataset.batch)
