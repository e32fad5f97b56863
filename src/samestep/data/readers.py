"""Reads examples into towers' batches, in this process, a thread of it, or a loader process."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from samestep.errors import BatchError
from samestep.streams import GlobalStreams, seed_globals, stream_seed
from samestep.towers.batch import GlobalBatch

__all__ = [
    "BatchedDataset",
    "BatchedReader",
    "Reader",
    "Request",
    "RequestSampler",
    "is_batched",
    "noted",
    "read_ahead",
]

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64
_NUM_AHEAD = 2


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that makes many examples in one call.

    Its rows must depend on their own example and seed alone, whatever else is in the call, and it may run
    in a thread beside the passes: `samestep.streams.uniforms` turns seeds into random numbers of that kind.
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Any:
        """Return the examples as a nest of tensors, rows first; `seeds` has one for each example."""


@dataclass(frozen=True)
class Request:
    """One batch, before it is read: the numbers of the examples of each of this worker's towers."""

    epoch: int
    position: int
    rows: int
    fingerprint: int
    examples: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class Reader(Dataset[dict[int, Any]]):
    """A dataset for DataLoader whose "indices" are requests, and whose "examples" are towers' batches.

    It holds nothing that changes, so a loader process may read any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: Request) -> dict[int, Any]:
        with _as_in_a_loader_process():
            slices = {tower: self._read(request, tower) for tower in request.examples}
        return {tower: pytree.tree_map_only(Tensor, _aligned, batch) for tower, batch in slices.items()}

    def _read(self, request: Request, tower: int) -> Any:
        rows = [self._example(request.epoch, int(example)) for example in request.examples[tower]]
        seed_globals(stream_seed(self.seed, "collate", request.position, tower), _CPU)
        return (self.collate_fn or default_collate)(rows)

    def _example(self, epoch: int, example: int) -> Any:
        seed_globals(stream_seed(self.seed, "example", epoch, example), _CPU)
        return self.dataset[example]


@dataclass(frozen=True)
class BatchedReader(Dataset[dict[int, Any]]):
    """The same for a `BatchedDataset`: one call reads all towers' rows, which are then copied apart.

    It leaves all global state alone, so it may run in a thread beside the passes.
    """

    dataset: BatchedDataset
    seed: int

    def __getitem__(self, request: Request) -> dict[int, Any]:
        examples = np.concatenate(list(request.examples.values()) or [np.zeros(0, np.int64)])
        if not len(examples):
            return {}
        seeds = [stream_seed(self.seed, "example", request.epoch, int(example)) for example in examples]
        batch = GlobalBatch.open(self.dataset.batch(examples, np.array(seeds, dtype=np.uint64)))
        if batch.rows != len(examples):
            raise BatchError(
                f"{type(self.dataset).__name__}.batch returned {batch.rows} rows for {len(examples)} "
                "examples: expected one each"
            )
        starts = np.cumsum([0, *(len(rows) for rows in request.examples.values())]).tolist()
        parts = zip(request.examples, starts[:-1], starts[1:], strict=True)
        return {tower: batch.take(range(start, stop), _CPU) for tower, start, stop in parts}


@dataclass
class RequestSampler:
    """Gives DataLoader requests for indices: those set last, each time that it is iterated over."""

    requests: Iterator[Request] = field(default_factory=lambda: iter(()))

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def noted(requests: Iterator[Request], asked: deque[Request]) -> Iterator[Request]:
    """Note each request when it is asked for: the answers come in the same order."""
    for request in requests:
        asked.append(request)
        yield request


def read_ahead(reader: BatchedReader | Reader, requests: Iterable[Request]) -> Iterator[dict[int, Any]]:
    """Read in a background thread, so that the passes find their batches made."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="samestep-loader")
    try:
        waiting: deque[Future[dict[int, Any]]] = deque()
        for request in requests:
            waiting.append(pool.submit(reader.__getitem__, request))
            if len(waiting) > _NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


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


def _aligned(tensor: Tensor) -> Tensor:
    """Move a tensor to memory that starts at the same alignment in every process.

    Kernels may choose by alignment, and arrays from NumPy start where torch's own would not.
    """
    on_cpu = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return tensor.clone() if on_cpu and tensor.data_ptr() % _ALIGNMENT_BYTES else tensor


def is_batched(dataset: object) -> bool:
    """Say whether a dataset is a `BatchedDataset`."""
    # Hugging Face's datasets have a method `batch` too, which does something else.
    return isinstance(dataset, BatchedDataset) and "seeds" in inspect.signature(dataset.batch).parameters
