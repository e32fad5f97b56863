"""Reads examples into towers' batches, in this process, in a thread of it, or in a loader process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    "COMPARE_EVERY",
    "BatchedDataset",
    "BatchedReader",
    "Compared",
    "Reader",
    "Request",
    "aligned",
    "as_in_a_loader_process",
    "collates_at",
    "compares_at",
    "is_batched",
]

COMPARED = -1
"""The key, beside the towers' indices, of what all workers compare."""

_CPU = torch.device("cpu")
COMPARE_EVERY = 32  # batches
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

    The k-th occurrence (from 0) of an example in an epoch has the number index + k · `REPEAT`.

    Attributes:
        epoch: the epoch.
        position: the batch's number in the run.
        examples: by tower.
        compared: an example that all workers read and compare; None to compare none.
        collated: the examples of tower 0, if all workers collate and compare them, too.
    """

    epoch: int
    position: int
    examples: Mapping[int, NDArray[np.int64]]
    compared: int | None = None
    collated: NDArray[np.int64] | None = None

    def without_comparison(self) -> Request:
        """Return a request for the same examples, with nothing to compare."""
        return replace(self, compared=None, collated=None)


class Compared(NamedTuple):
    """Checksums, for all workers to compare: of an example, and of a collated tower, or 0."""

    example: int
    collated: int = 0


def collates_at(position: int) -> bool:
    """Return whether all workers collate and compare tower 0's rows: in batches 0, 1, 2, 4, 8, 16, ..."""
    return _is_power_of_two_or_0(position)


def compares_at(position: int, num_batches: int) -> bool:
    """Return whether all workers read and compare a batch's first example.

    It is so in batches 0, 1, 2, 4, 8, 16, ..., in every 32nd, and at the start of epochs 1, 2, 4, 8, ...

    >>> [position for position in range(80) if compares_at(position, num_batches=10)]
    [0, 1, 2, 4, 8, 10, 16, 20, 32, 40, 64]
    """
    epoch, number = divmod(position, num_batches)
    starts_epoch = number == 0 and _is_power_of_two_or_0(epoch)
    return position % COMPARE_EVERY == 0 or collates_at(position) or starts_epoch


def _is_power_of_two_or_0(number: int) -> bool:
    return number & (number - 1) == 0


class _First(NamedTuple):
    """The rows of tower 0 before they are collated.

    Attributes:
        example: the fingerprint of the first one.
        rows: copies to collate again; None without a `collate_fn`, or if they cannot be copied whole.
    """

    example: int
    rows: list[Any] | None

    @classmethod
    def of(cls, rows: list[Any], *, has_collate_fn: bool) -> _First:
        """Keep rows as they are now: a `collate_fn` may write to them."""
        is_kept = has_collate_fn and _is_copied_whole(rows)
        return cls(fingerprint(Whole(rows[0])), [mapped(copied, row) for row in rows] if is_kept else None)


@dataclass(frozen=True)
class Reader(Dataset[dict[int, Any]]):
    """A dataset for DataLoader, with requests as its "indices" and towers' batches as its "examples".

    It has no mutable state, so a loader process may read any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: Request) -> dict[int, Any]:
        # A collate_fn may return the dataset's own memory, to which a pass may write, or its own.
        own = aligned if self.collate_fn is None else copied
        with as_in_a_loader_process():
            slices: dict[int, Any] = {}
            first: _First | None = None
            for tower, numbers in request.examples.items():
                rows = self._examples(request, numbers)
                if tower == 0 and request.compared is not None:
                    first = _First.of(rows, has_collate_fn=self.collate_fn is not None)
                slices[tower] = mapped(own, self._collated(rows, request.position, tower))
            if request.compared is None:
                return slices
            example = self._compared(request, request.compared, first)
            return {COMPARED: Compared(example, self._collated_again(request, first, slices)), **slices}

    def _examples(self, request: Request, numbers: NDArray[np.int64]) -> list[Any]:
        return [self._example(request.epoch, number) for number in numbers.tolist()]

    def _collated(self, rows: list[Any], position: int, tower: int) -> Any:
        with self._seeded(stream_seed(self.seed, "collate", position, tower)):
            return (self.collate_fn or default_collate)(rows)

    def _compared(self, request: Request, compared: int, first: _First | None) -> int:
        """Return the fingerprint of the compared example; check it against `first`, if tower 0 was read."""
        number = fingerprint(Whole(self._example(request.epoch, compared)))
        if first is not None and first.example != number:
            raise UsageError(
                f"{type(self.dataset).__name__}: example {compared % REPEAT} is different when it is read "
                "again: expected it to depend only on its index, and on torch's, Python's and NumPy's global "
                "generators, which are seeded for it, not on a generator or a counter of the dataset"
            )
        return number

    def _collated_again(self, request: Request, first: _First | None, slices: Mapping[int, Any]) -> int:
        """Collate tower 0's rows after all others; check that this gives the same batch, if it was read.

        Return its fingerprint if all workers compare it, else 0.
        """
        if first is None and request.collated is not None and self.collate_fn is not None:
            first = _First.of(self._examples(request, request.collated), has_collate_fn=True)
        if first is None or first.rows is None:
            return 0
        found = fingerprint(Whole(self._collated(first.rows, request.position, 0)))
        if 0 in slices and fingerprint(Whole(slices[0])) != found:
            raise UsageError(
                "collate_fn makes a different batch of the same examples when it is called again: expected "
                "it to depend only on them, and on torch's, Python's and NumPy's global generators, which "
                "are seeded for it, not on a generator, a counter or anything else that it keeps"
            )
        return 0 if request.collated is None else found

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
        return {COMPARED: Compared(fingerprint(first.root)), **slices}

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
