"""The data of a run: one global order, a random stream for each example, torch's DataLoader underneath.

The examples of a batch depend on (seed, epoch) alone, and the random numbers of an example on (seed, epoch,
example). So every placement, and any number of loader processes, sees the same batches, and a run can
continue from batch 1,000,000 without reading the ones before.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from samestep.data.loader_processes import read_through, timeout_option
from samestep.data.readers import BatchedReader, Reader, Request, is_batched
from samestep.data.single_rows import warn_of_single_rows
from samestep.data.stream import RequestSampler, Stream
from samestep.errors import ConfigError, UsageError
from samestep.identity import check_same
from samestep.streams import generator
from samestep.summation.placement import Placement
from samestep.towers.batch import LocalBatch, Slices
from samestep.workers.job import Job
from samestep.workers.process import join_own_group

__all__ = ["PlacedTowers", "TowerLoader"]

_OWNED = {
    "sampler": "the order of an epoch depends on seed and epoch alone; use shuffle, or order the dataset",
    "batch_sampler": "batches are cut into towers here; use batch_size and drop_last",
    "generator": "every random stream comes from seed; use seed",
    "worker_init_fn": "its effects would depend on the number of loader processes; use the dataset",
    "in_order": "batches always come in order",
}


class PlacedTowers(Protocol):
    """What a `TowerLoader` needs of `samestep.Towers`; `placement` may change between any two steps."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def placement(self) -> Placement:
        """Which towers each worker runs."""

    @property
    def job(self) -> Job:
        """This process's view of the job."""


class TowerLoader:
    """Loads this worker's rows of each global batch, already cut into towers.

    An iteration yields the rest of the current epoch, from `position` on; the next one is the next epoch's.
    Around `dataset[example]` torch's CPU generator, Python's `random` and NumPy's legacy generator are
    seeded from (seed, epoch, example), and around `collate_fn` from (seed, position, tower). Examples are
    read with one CPU thread, in loader processes and without.

    Where a batch leaves some tower a single row and the model has a `BatchNorm1d`, there is a warning.

    A batch's slices are read one by one, small ones up to 4 MiB together: a loader process holds
    `prefetch_factor` of these, not batches. They are handed out when they are asked for, in order; one that
    is asked for again, or later, is read again.
    What was read ahead is for the towers' current placement. When that has been replaced, it is dropped and
    read again for the new one; `persistent_workers=True` keeps the loader processes then.

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
        ConfigError: no examples, no whole batch, a batch size below 1, or an option that cannot be set here.
        LoaderError: later, a loader process was killed, or none has answered for `timeout`, by default that
            of the job.

    Example:
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
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        batched = is_batched(dataset)
        _check(dataset, batch_size, drop_last)
        _check_options(dataloader_options, collate_fn if batched else None)
        warn_of_single_rows(
            towers.model,
            towers.placement.num_towers,
            examples=len(dataset),
            batch_size=batch_size,
            drop_last=drop_last,
        )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._towers = towers
        self._position = 0
        self._sampler = RequestSampler()
        self._reader = BatchedReader(dataset, seed) if batched else Reader(dataset, seed, collate_fn)
        self._stream: Stream | None = None
        options = {"num_workers": 0, "persistent_workers": False, **dataloader_options}
        timeout_s = options.pop("timeout", 0) or towers.job.timeout_s
        in_thread = batched and not options["num_workers"]
        loader: DataLoader[Any] = DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_as_it_is,
            # Without one of its own, DataLoader draws a number from torch's global generator each epoch.
            generator=torch.Generator(),
            worker_init_fn=_start_loader_process,
            timeout=timeout_option(options["num_workers"], options["persistent_workers"], timeout_s),
            **options,
        )
        read_ahead = partial(read_through, loader, towers.job.rank, timeout_s)
        self._read_ahead = None if in_thread else read_ahead

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

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings that it depends on."""
        return {"position": self._position, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of what `state_dict` returned, with any number of workers.

        Raises:
            ConfigError: it is from a run with another batch size, seed, number of examples, `shuffle` or
                `drop_last`.
        """
        check_same(state, self._settings, "loader")
        self.position = state["position"]

    @property
    def _settings(self) -> dict[str, int]:
        names = ("batch_size", "seed", "shuffle", "drop_last")
        return {"examples": len(self.dataset), **{name: getattr(self, name) for name in names}}

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position // len(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return _num_batches(len(self.dataset), self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[LocalBatch]:
        """Iterate over the rest of the current epoch.

        Raises:
            UsageError: `position` was set, or another iteration went on, since the last batch of this one.
        """
        expected, end = self._position, (self.epoch + 1) * len(self)
        order = self._order(self.epoch)
        while expected < end:
            # What is read ahead is for this placement. The next step may be under another one, and then
            # it is read again from there on.
            placement = self._towers.placement
            with closing(self._read(order, range(expected, end), placement)) as batches:
                while expected < end and self._towers.placement == placement:
                    self._check_unmoved(expected)
                    batch = next(batches)
                    expected = self._position = expected + 1
                    yield batch

    def _read(
        self, order: NDArray[np.int64], positions: range, placement: Placement
    ) -> Generator[LocalBatch]:
        """Yield batches; their slices are read ahead one by one, and handed out when they are asked for."""
        if self._stream is not None:
            self._stream.close()  # a DataLoader that keeps its processes reads for one iteration at a time
        requests = (self._request(self._rows(order, each), each, placement) for each in positions)
        row_bytes = math.inf if self._stream is None else self._stream.row_bytes
        self._stream = Stream(requests, self._reader, self._read_ahead, self._sampler, row_bytes)
        with closing(self._stream) as stream:
            for position in positions:
                rows = self._rows(order, position)
                request = self._request(rows, position, placement)
                slices = Slices(tuple(request.examples), partial(stream.take, request))
                yield LocalBatch(len(rows), slices, position, zlib.crc32(rows.tobytes()))

    def _rows(self, order: NDArray[np.int64], position: int) -> NDArray[np.int64]:
        """Return the examples of a batch."""
        start = position % len(self) * self.batch_size
        return order[start : start + self.batch_size]

    def _request(self, rows: NDArray[np.int64], position: int, placement: Placement) -> Request:
        """Ask for this worker's towers that have rows."""
        mine = placement.rows(self._towers.job.rank, len(rows))
        examples = {tower: rows[part.start : part.stop] for tower, part in mine.items()}
        return Request(position // len(self), position, examples)

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
                "starting another iteration, do not continue an old one"
            )


def _start_loader_process(_: int) -> None:
    join_own_group()


def _as_it_is(batch: Any) -> Any:
    return batch


def _num_batches(examples: int, batch_size: int, drop_last: bool) -> int:
    return examples // batch_size if drop_last else -(-examples // batch_size)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
