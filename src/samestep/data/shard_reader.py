"""Reads the shards of a worker's towers, batch by batch, in this process or a loader process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from samestep.batches.copier import copied
from samestep.batches.nest import mapped
from samestep.data.readers import aligned, as_in_a_loader_process
from samestep.data.shards import Shard, Source, open_shard, seen_as
from samestep.streams import seed_globals, stream_seed

__all__ = ["Ended", "ShardReader"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ended:
    """Takes the place of a tower's batch if its shard has ended, after `num_examples` of the epoch."""

    tower: int
    num_examples: int


@dataclass(frozen=True)
class ShardReader(IterableDataset[Any]):
    """Yields the towers' batches in order, and None up to a multiple of the number of loader processes.

    It has no mutable state. Each of n loader processes yields every n-th item, and DataLoader merges them in
    order.

    Attributes:
        source: see `StreamLoader`.
        rows: from each tower that is read to its rows in a batch.
        num_towers: T.
        seed: the seed of all random streams.
        epoch: the epoch to read.
        position: the position in the run of the first batch to read.
        num_before: batches of the epoch before that one.
        collate_fn: a tower's list of examples -> its batch.
    """

    source: Source
    rows: Mapping[int, int]
    num_towers: int
    seed: int
    epoch: int
    position: int
    num_before: int
    collate_fn: Callable[[list[Any]], Any] | None

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, num_processes = (0, 1) if worker is None else (worker.id, worker.num_workers)
        padding = [None] * (-len(self.rows) % num_processes)
        towers = [*self.rows, *padding][index::num_processes]
        readers = {tower: _TowerReader(self, tower) for tower in towers if tower is not None}
        for position in itertools.count(self.position):
            for tower in towers:
                yield None if tower is None else readers[tower].next(position)


class _TowerReader:
    """Reads one tower's shard, from its current example on; opens it for the first batch."""

    def __init__(self, reader: ShardReader, tower: int) -> None:
        self._reader = reader
        self._tower = tower
        self._shard: Shard | None = None
        self._num_read = 0
        self._has_ended = False

    def next(self, position: int) -> Any:
        """Return the tower's next batch, or `Ended` if too few examples are left for one."""
        reader, tower = self._reader, self._tower
        with as_in_a_loader_process():
            if self._shard is None:
                self._open()
            rows = [*itertools.islice(self._examples(), reader.rows[tower])]
            if self._has_ended:
                return Ended(tower, self._num_read)
            seed_globals(stream_seed(reader.seed, "collate", position, tower), _CPU)
            own = aligned if reader.collate_fn is None else copied  # it may return memory that it uses again
            return mapped(own, (reader.collate_fn or default_collate)(rows))

    def _open(self) -> None:
        reader, tower = self._reader, self._tower
        start = reader.num_before * reader.rows[tower]
        seed_globals(stream_seed(reader.seed, "shard", reader.epoch, tower), _CPU)
        with seen_as(None):
            self._shard = open_shard(
                reader.source, tower, reader.num_towers, epoch=reader.epoch, seed=reader.seed, start=start
            )
        self._num_read = self._shard.start
        for _ in itertools.islice(self._examples(), start - self._num_read):
            pass

    def _examples(self) -> Iterator[Any]:
        """Yield examples, each read under its own random stream, until the shard ends."""
        assert self._shard is not None
        reader, tower = self._reader, self._tower
        while not self._has_ended:
            place = (self._num_read,) if self._shard.is_shared else (tower, self._num_read)
            seed_globals(stream_seed(reader.seed, "stream", reader.epoch, *place), _CPU)
            try:
                with seen_as(self._shard.worker):
                    example = next(self._shard.examples)
            except StopIteration:
                self._has_ended = True
                return
            except Exception as error:
                where = f"example {self._num_read} of tower {tower}'s shard in epoch {reader.epoch}"
                error.add_note(f"samestep: in {where}")
                raise
            self._num_read += 1
            yield example
