"""The data of a run: one global order, a random stream for each example, read by torch's DataLoader.

The order of an epoch depends on (seed, epoch) alone, and the random numbers of an example on (seed, epoch,
example). So the batches are the same for every placement and any number of loader processes, and a run can
continue from batch 1,000,000 without reading the earlier ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from samestep.arguments import check_callable, whole
from samestep.batches.batch import LocalBatch, Slices
from samestep.data.compared_example import ComparedExample
from samestep.data.dataloader import check_options, check_towers, reading
from samestep.data.epochs import Epochs
from samestep.data.from_dataloader import options_of
from samestep.data.loader_state import check_state, number_in, numbers_in
from samestep.data.order import Order
from samestep.data.progress import Progress
from samestep.data.readers import (
    COMPARED,
    BatchedReader,
    Reader,
    Request,
    collates_at,
    compares_at,
    is_batched,
)
from samestep.data.shards import has_indices
from samestep.data.single_rows import warn_of_single_rows
from samestep.data.stream import RequestSampler, Stream
from samestep.errors import ConfigError, UsageError
from samestep.summation.placement import Placement
from samestep.workers.job import Job

__all__ = ["PlacedTowers", "TowerLoader"]


class PlacedTowers(Protocol):
    """The part of `samestep.Towers` that a `TowerLoader` uses; `placement` may change between steps."""

    @property
    def model(self) -> nn.Module:
        """The model in training."""

    @property
    def placement(self) -> Placement:
        """Which towers each worker runs."""

    @property
    def job(self) -> Job:
        """This process's view of the job."""


@dataclass(frozen=True)
class IncompleteBatch(LocalBatch):
    """An epoch's last batch; `look` is called when a program looks at its size, and may leave it out."""

    look: Callable[[], None] = field(kw_only=True, repr=False, compare=False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("rows", "slices"):
            super().__getattribute__("look")()
        return super().__getattribute__(name)


class TowerLoader:
    """Loads this worker's rows of each global batch, already cut into towers.

    An iteration yields the rest of the current epoch, from `position` on; the next iteration, the next epoch.
    In training, a batch counts once a step has used it, or once the loop takes the next one: one that is left
    by `break` before its step is the next iteration's first.

    While `dataset[example]` runs, torch's CPU generator, Python's `random` and NumPy's legacy generator are
    seeded from (seed, epoch, example); while `collate_fn` runs, from (seed, position, tower). Each repeat of
    an example in an epoch has its own stream. Examples are read with one CPU thread, whether or not in loader
    processes.

    All workers read the first example of every 32nd batch, and of more at the beginning, and compare it.
    There is a warning if a batch gives some tower a single row and the model has a `BatchNorm1d`.

    A batch is read slice by slice (one tower's rows each; small ones together, up to 4 MiB), so a loader
    process holds `prefetch_factor` slices, not batches. Slices are read ahead in order; a slice that is
    accessed again, or out of order, is read again. When the towers' placement changes, slices read ahead are
    dropped and read for the new placement; `persistent_workers=True` keeps the loader processes then.

    Args:
        dataset: map-style, with `len(dataset)` and `dataset[example]`; or a `BatchedDataset`, which reads
            a tower's rows in one call.
        batch_size: rows of the global batch.
        towers: a `samestep.Towers`.
        seed: the seed of the order and of all examples' random streams.
        shuffle: draw a new permutation for each epoch, the default without `order`; if False, keep the
            dataset's order.
        order: `order(seed, epoch)` -> the indices of an epoch's examples, int64 [n], for weighted sampling,
            subsets or grouping by length: a tensor, an array, or an iterable such as a torch `Sampler`. It
            may repeat examples and have any length that gives the same number of batches in every epoch. Each
            call for an epoch must return the same; (seed, epoch) seeds the global generators for it. See
            docs/data.md.
        drop_last: leave out an epoch's last batch if it is incomplete.
        collate_fn: a tower's list of examples -> its batch; torch's `default_collate` by default.
        dataloader_options: passed on to `torch.utils.data.DataLoader`, such as `num_workers`, `pin_memory`,
            `prefetch_factor`, `persistent_workers`, `multiprocessing_context`, `timeout`.

    Raises:
        ConfigError: the dataset is empty or has no whole batch, `batch_size` is below 1, an option cannot be
            set here, or `order` returns anything but indices; while iterating, `order` gives another number
            of batches than in epoch 0.
        LoaderError: while iterating, a loader process was killed, or none answered within `timeout`, by
            default that of the job.

    Example:
        >>> import torch
        >>> from samestep import Towers
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
        shuffle: bool | None = None,
        order: Order | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        batched = is_batched(dataset)
        _check(dataset)
        check_towers(towers)
        _check_collate(collate_fn, batched=batched)
        check_options(dataloader_options, "TowerLoader")
        self.dataset = dataset
        self._epochs = epochs = Epochs(
            dataset, batch_size, seed=seed, shuffle=shuffle, order=order, drop_last=drop_last
        )
        warn_of_single_rows(
            towers.model,
            towers.placement.num_towers,
            examples=epochs.num_rows,
            batch_size=epochs.batch_size,
            drop_last=drop_last,
        )
        self._towers = towers
        self._progress = Progress(towers, towers.job)
        self._compared = ComparedExample()
        self._sampler = RequestSampler()
        self._reader = (
            BatchedReader(dataset, self.seed) if batched else Reader(dataset, self.seed, collate_fn)
        )
        self._stream: Stream | None = None
        read_ahead = reading(self._reader, towers.job, dataloader_options, sampler=self._sampler)
        in_thread = batched and not dataloader_options.get("num_workers")
        self._read_ahead = None if in_thread else read_ahead

    # Read-only: the batches of a run depend on these.

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self._epochs.batch_size

    @property
    def seed(self) -> int:
        """The seed of the order and of all examples' random streams."""
        return self._epochs.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a permutation of its own."""
        return self._epochs.shuffle

    @property
    def drop_last(self) -> bool:
        """Whether an epoch's last batch is left out if it is incomplete."""
        return self._epochs.drop_last

    @property
    def position(self) -> int:
        """Batches used over the whole run, all epochs together. Setting it reads no data.

        Raises:
            ConfigError: it is set to anything but an int of at least 0.
        """
        return self._progress.position

    @position.setter
    def position(self, position: int) -> None:
        self._progress.move_to(whole("position", position, 0, "the batches used so far"))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings it depends on.

        There is a warning if a run that continues from it would use other batches, see docs/data.md.
        """
        self._progress.check_used()
        return self._state()

    def _state(self, *, in_loop: bool = False) -> dict[str, Any]:
        """Return the state; `in_loop` to repeat a step, with the batch that its loop has taken."""
        return {
            "position": self._progress.num_taken if in_loop else self.position,
            "compared": self._compared.state,
            "order_of_epoch": self._epochs.newest,
            **self._progress.state,
            **self._epochs.settings,
        }

    @classmethod
    def from_dataloader(
        cls, loader: DataLoader[Any], towers: PlacedTowers, *, seed: int = 0, batch_size: int | None = None
    ) -> TowerLoader:
        """Return a loader with the dataset, batch size and options of a torch `DataLoader`.

        Each worker reads its own rows only. torch's sequential and random samplers set `shuffle`; any other
        sampler becomes `order`.

        Args:
            loader: the DataLoader, which is not iterated over. Its `batch_size` is taken as the global one.
            towers: a `samestep.Towers`.
            seed: the seed of the order and of all examples' random streams.
            batch_size: another global size, such as the loader's times the number of processes or
                accumulation steps.

        Raises:
            ConfigError: the loader has a part without a counterpart here, such as a `batch_sampler`, a
                generator, a `worker_init_fn`, an `IterableDataset`, or a `DistributedSampler`.

        Example:
            >>> import torch
            >>> from samestep import Towers
            >>> plain = DataLoader([10, 11, 12, 13, 14], batch_size=3)
            >>> loader = TowerLoader.from_dataloader(plain, Towers(torch.nn.Linear(1, 1), 2))
            >>> [batch.slices for batch in loader]
            [{0: tensor([10, 11]), 1: tensor([12])}, {0: tensor([13]), 1: tensor([14])}]
        """
        options = options_of(loader)
        if batch_size is not None:
            options["batch_size"] = batch_size
        return cls(towers=towers, seed=seed, **options)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in a `state_dict`, with any number of workers.

        If the example that was compared last is another one now, there is a warning at the next batch.

        Raises:
            ConfigError: the state is from a run with another batch size, seed, number of examples,
                `shuffle`, `drop_last` or `order`; of an order only epoch 0 is compared. Or it is no state.
        """
        check_state(state, self._epochs.settings)
        position, compared = number_in(state, "position"), numbers_in(state, "compared", 3)
        order = numbers_in(state, "order_of_epoch", 2)
        self._progress.load(position, state)
        self._compared.load(compared)
        self._epochs.newest = order

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.position // len(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._epochs)

    def __iter__(self) -> Iterator[LocalBatch]:
        """Iterate over the rest of the current epoch.

        Raises:
            ConfigError: `order` gives another number of batches than in epoch 0, or no indices; or, without
                `order`, the dataset has another length than when the loader was made.
            UsageError: since the last batch, `position` was set or another iteration yielded a batch.
        """
        expected = self._progress.begin()
        epoch, number = expected // len(self), self._progress.num_begun
        compares = self._progress.num_taken % len(self) > 0 and self._towers.job.is_first
        end, order = (epoch + 1) * len(self), self._epochs.order(epoch, compares=compares)
        while expected < end:
            # Slices read ahead are for this placement. If it changes between steps, read again from there.
            placed = self._towers.placement, self._towers.job.rank
            with closing(self._read(order, range(expected, end))) as batches:
                while expected < end and (self._towers.placement, self._towers.job.rank) == placed:
                    self._check_unmoved(expected, number)
                    self._epochs.check_length()
                    batch = next(batches)
                    expected += 1
                    with self._progress.handing_out():
                        yield batch
        self._progress.end_epoch()

    def _read(self, order: NDArray[np.int64], positions: range) -> Generator[LocalBatch]:
        """Yield batches with slices that are read ahead one by one, and returned on access."""
        if self._stream is not None:
            self._stream.close()  # a DataLoader with persistent processes allows one iteration at a time
        # Evaluated now, because the generator below runs later.
        placed = self._towers.placement, self._towers.job.rank
        rows, checksum = partial(self._epochs.rows, order), self._epochs.checksum(order)
        requests = (self._request(rows(each), each, *placed) for each in positions)
        again = self._compared.request(positions.start) if self._towers.job.is_first else None
        row_bytes = math.inf if self._stream is None else self._stream.row_bytes
        first = () if again is None else (again,)
        self._stream = Stream(
            chain(first, requests), self._reader, self._read_ahead, self._sampler, row_bytes
        )
        with closing(self._stream) as stream:
            if again is not None:
                self._compared.check(stream.take(again, COMPARED))
            for position in positions:
                yield self._batch(stream.take, rows(position), position, checksum)

    def _batch(
        self, read: Callable[[Request, int], Any], rows: NDArray[np.int64], position: int, checksum: int
    ) -> LocalBatch:
        """Return a batch with slices that are read on access."""
        request = self._request(rows, position, self._towers.placement, self._towers.job.rank)
        assert self._stream is not None
        compared = None if request.compared is None else cache(partial(self._compared.read, read, request))
        is_complete = len(rows) == self.batch_size
        make = LocalBatch if is_complete else partial(IncompleteBatch, look=self._progress.look)
        return make(
            len(rows),
            Slices(tuple(request.examples), partial(read, request)),
            position,
            zlib.crc32(rows.tobytes(), checksum),
            again=partial(self._batch, self._stream.read, rows, position, checksum),
            compared=compared,
            used=partial(self._progress.use, position, is_complete=is_complete),
        )

    def _request(self, rows: NDArray[np.int64], position: int, placement: Placement, worker: int) -> Request:
        """Return the request for a worker's towers that have rows."""
        mine = placement.rows(worker, len(rows))
        examples = {tower: rows[part.start : part.stop] for tower, part in mine.items()}
        compared = int(rows[0]) if compares_at(position, len(self)) else None
        collated = rows[: len(placement.rows(0, len(rows))[0])] if collates_at(position) else None
        return Request(position // len(self), position, examples, compared, collated)

    def _check_unmoved(self, expected: int, number: int) -> None:
        if not self._progress.is_at(expected, number):
            raise UsageError(
                f"position is {self._progress.num_taken}, this iteration is at {expected}: after setting "
                "position or starting another iteration, do not continue an old one"
            )


def _check(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise ConfigError("dataset is a DataLoader: expected its dataset, or use TowerLoader.from_dataloader")
    if not hasattr(dataset, "__len__") or not (is_batched(dataset) or has_indices(dataset)):
        lacks = "indices" if hasattr(dataset, "__len__") else "a length"
        raise ConfigError(
            f"dataset is a {type(dataset).__name__} without {lacks}: expected a map-style dataset, with "
            "__len__ and __getitem__; a StreamLoader reads streams"
        )
    if len(dataset) == 0:
        raise ConfigError(f"dataset ({type(dataset).__name__}) is empty: expected at least one example")


def _check_collate(collate_fn: object, *, batched: bool) -> None:
    if collate_fn is not None:
        check_callable("collate_fn", collate_fn, "a function of a list of examples")
        if batched:
            raise ConfigError(
                "collate_fn has no effect on a BatchedDataset: do its work in the dataset's batch()"
            )
