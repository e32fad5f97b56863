"""The data of a run: one global order, a random stream for each example, torch's DataLoader underneath.

Which examples are in a batch follows from (seed, epoch), and the random numbers that an example meets from
(seed, epoch, example). So every placement, and any number of loader processes, sees the same batches, and
a run can go on from batch 1,000,000 without reading the ones before.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from samestep.batch import GlobalBatch, LocalBatch
from samestep.errors import BatchError, ConfigError, UsageError
from samestep.job import Job
from samestep.placement import Placement, even_ranges
from samestep.streams import GlobalStreams, generator, seed_globals, stream_seed

__all__ = ["BatchedDataset", "PlacedTowers", "TowerLoader"]

_CPU = torch.device("cpu")
_ALIGNMENT_BYTES = 64  # of the memory that torch allocates
_OWNED = {
    "sampler": "the order of an epoch depends on seed and epoch alone; use shuffle, or order the dataset",
    "batch_sampler": "batches are cut into towers here; use batch_size and drop_last",
    "generator": "every random stream comes from seed; use seed",
    "worker_init_fn": "its effects would depend on the number of loader processes; set up in the dataset",
    "in_order": "batches always come in order",
}


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that makes many examples in one call.

    The arrays must have rows that depend on their own example and seed alone, whatever else is in the call;
    `samestep.streams.uniforms` turns seeds into random numbers of that kind.
    """

    def __len__(self) -> int:
        """Return the number of examples."""

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> Any:
        """Return the examples as a nest of tensors, rows first; `seeds` has one for each example."""


class PlacedTowers(Protocol):
    """What a `TowerLoader` needs of `samestep.Towers`."""

    @property
    def placement(self) -> Placement:
        """Which towers each worker runs."""

    @property
    def job(self) -> Job:
        """This process's view of the job."""


@dataclass(frozen=True)
class _Request:
    """One batch, before it is read: the numbers of the examples of each of this worker's towers."""

    epoch: int
    position: int
    rows: int
    fingerprint: int
    examples: Mapping[int, NDArray[np.int64]]


class TowerLoader:
    """Loads this worker's rows of each global batch, already cut into towers.

    Iterating walks the rest of the current epoch, from `position` on; the next `iter` walks the next epoch.
    Around `dataset[example]` torch's CPU generator, Python's `random` and NumPy's legacy generator are
    seeded from (seed, epoch, example), and around `collate_fn` from (seed, position, tower). Examples are
    read with one CPU thread, in loader processes and without.

    Args:
        dataset: map-style: `len(dataset)` and `dataset[example]`; or a `BatchedDataset`, of which each
            tower's rows are read by one call.
        batch_size: rows of the global batch.
        towers: a `samestep.Towers`.
        seed: of the order and of all examples' random streams.
        shuffle: a new permutation for each epoch; otherwise the dataset's own order.
        drop_last: leave out an epoch's last batch where it is short.
        collate_fn: a tower's list of examples -> its batch; torch's `default_collate` by default.
        dataloader_options: passed on to `torch.utils.data.DataLoader`, such as `num_workers`, `pin_memory`,
            `prefetch_factor`, `persistent_workers`, `multiprocessing_context`, `timeout`.

    Raises:
        ConfigError: no examples, no whole batch, a batch size below 1, or an option that has no place here.

    Example:
        >>> from samestep.towers import Towers
        >>> towers = Towers(torch.nn.Linear(1, 1), 2)
        >>> loader = TowerLoader([10, 11, 12, 13, 14], 3, towers, shuffle=False)
        >>> for batch in loader:
        ...     print(batch.position, batch.rows, batch.slices)
        0 3 {0: tensor([10, 11]), 1: tensor([12])}
        1 2 {0: tensor([13]), 1: tensor([14])}
        >>> loader.position, loader.epoch
        (2, 1)
    """

    def __init__(  # noqa: PLR0913 - the settings of the order, each with a default
        self,
        dataset: Any,
        batch_size: int,
        towers: PlacedTowers,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        batched = _is_batched(dataset)
        _check(dataset, batch_size, drop_last)
        _check_options(dataloader_options, collate_fn if batched else None)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._towers = towers
        self._position = 0
        self._requests: list[_Request] = []
        reader = _BatchedReader(dataset, seed) if batched else _Reader(dataset, seed, collate_fn)
        self._loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            # Without one of its own, DataLoader draws a number from torch's global generator each epoch.
            generator=torch.Generator(),
            **dataloader_options,
        )

    @property
    def position(self) -> int:
        """Batches handed out over the whole run, all epochs together. Setting it reads no data.

        Raises:
            ConfigError: it is set to something else than an int of at least 0.
        """
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if not _is_int(position) or position < 0:
            raise ConfigError(f"position = {position!r}: expected an int >= 0, the batches handed out so far")
        self._position = position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position // len(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return _num_batches(len(self.dataset), self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[LocalBatch]:
        """Walk the rest of the current epoch.

        Raises:
            UsageError: `position` was set, or another iteration went on, since the last batch of this one.
        """
        requests = list(self._rest_of_epoch())
        self._requests[:] = requests
        batches = iter(self._loader)
        for request in requests:
            self._check_unmoved(request.position)
            slices = next(batches)
            self._position += 1
            yield LocalBatch(request.rows, slices, request.position, request.fingerprint)

    def _rest_of_epoch(self) -> Iterator[_Request]:
        first_position = self.epoch * len(self)
        order, placement = self._order(self.epoch), self._towers.placement
        for position in range(self._position, first_position + len(self)):
            start = (position - first_position) * self.batch_size
            rows = order[start : start + self.batch_size]
            ranges = even_ranges(len(rows), placement.num_towers)
            mine = [tower for tower in placement.towers(self._towers.job.rank) if ranges[tower]]
            examples = {tower: rows[ranges[tower].start : ranges[tower].stop] for tower in mine}
            yield _Request(self.epoch, position, len(rows), zlib.crc32(rows.tobytes()), examples)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the epoch's examples in their global order, int64 [examples]."""
        if not self.shuffle:
            return np.arange(len(self.dataset), dtype=np.int64)
        order = torch.randperm(len(self.dataset), generator=generator(self.seed, "order", epoch))
        return np.asarray(order.numpy(), dtype=np.int64)

    def _check_unmoved(self, expected: int) -> None:
        if self._position != expected:
            raise UsageError(
                f"position is {self._position}, this iteration is at {expected}: after setting position or "
                "starting another iteration, do not go on with an old one"
            )


@dataclass(frozen=True)
class _Reader(Dataset[dict[int, Any]]):
    """What DataLoader takes for the dataset: its "indices" are requests, its "examples" are towers' batches.

    It holds nothing that changes, so a loader process can be given any request at any time.
    """

    dataset: Any
    seed: int
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __getitem__(self, request: _Request) -> dict[int, Any]:
        with _as_in_a_loader_process():
            slices = {tower: self.read(request, tower) for tower in request.examples}
        return {tower: pytree.tree_map_only(Tensor, _aligned, batch) for tower, batch in slices.items()}

    def read(self, request: _Request, tower: int) -> Any:
        rows = [self.example(request.epoch, int(example)) for example in request.examples[tower]]
        self.seed_tower(request, tower)
        return (self.collate_fn or default_collate)(rows)

    def example(self, epoch: int, example: int) -> Any:
        seed_globals(stream_seed(self.seed, "example", epoch, example), _CPU)
        return self.dataset[example]

    def seed_tower(self, request: _Request, tower: int) -> None:
        seed_globals(stream_seed(self.seed, "collate", request.position, tower), _CPU)


class _BatchedReader(_Reader):
    """The same for a `BatchedDataset`."""

    def read(self, request: _Request, tower: int) -> Any:
        examples = request.examples[tower]
        seeds = [stream_seed(self.seed, "example", request.epoch, int(example)) for example in examples]
        self.seed_tower(request, tower)
        batch = self.dataset.batch(examples, np.array(seeds, dtype=np.uint64))
        if (rows := GlobalBatch.open(batch).rows) != len(examples):
            name = type(self.dataset).__name__
            raise BatchError(
                f"{name}.batch returned {rows} rows for {len(examples)} examples: expected one each"
            )
        return batch


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


def _as_it_is(batch: Any) -> Any:
    return batch


def _num_batches(examples: int, batch_size: int, drop_last: bool) -> int:
    return examples // batch_size if drop_last else -(-examples // batch_size)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_batched(dataset: object) -> bool:
    # Hugging Face's datasets have a method `batch` too, which does something else.
    return isinstance(dataset, BatchedDataset) and "seeds" in inspect.signature(dataset.batch).parameters


def _check(dataset: Any, batch_size: int, drop_last: bool) -> None:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"dataset is a {type(dataset).__name__} without a length: expected a map-style dataset, with "
            "__len__ and __getitem__"
        )
    if not _is_int(batch_size) or batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size!r}: expected an int >= 1, the rows of the global batch")
    if len(dataset) == 0:
        raise ConfigError(f"dataset ({type(dataset).__name__}) is empty: expected at least one example")
    if _num_batches(len(dataset), batch_size, drop_last) == 0:
        raise ConfigError(
            f"batch_size = {batch_size} with drop_last leaves no batch of {len(dataset)} examples: expected "
            f"batch_size <= {len(dataset)}, or drop_last=False"
        )


def _check_options(options: Iterable[str], unused_collate_fn: object) -> None:
    for name in options:
        if name in _OWNED:
            raise ConfigError(f"{name} is not an option of TowerLoader: {_OWNED[name]}")
    if unused_collate_fn is not None:
        raise ConfigError(
            "collate_fn has no effect on a BatchedDataset: do its work in the dataset's batch()"
        )
