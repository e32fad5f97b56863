"""Data that comes as a stream: T shards, one for each tower, whichever workers read them."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import torch

from samestep.arguments import check_callable, whole
from samestep.batches.batch import LocalBatch
from samestep.batches.columns import Whole
from samestep.batches.fingerprint import fingerprint
from samestep.data.dataloader import check_options, check_towers, reading
from samestep.data.loader_state import check_state, number_in
from samestep.data.progress import Progress
from samestep.data.shard_reader import Ended, ShardReader
from samestep.data.shards import Source, check_source
from samestep.errors import BatchError, UsageError, warn
from samestep.summation.placement import Placement, even_ranges
from samestep.towers.towers import Towers
from samestep.workers.agreement import agree
from samestep.workers.collectives import gather_rows

__all__ = ["StreamLoader"]

_OWNED = {
    "shuffle": "a stream has the order of its source; shuffle there",
    "order": "a stream has the order of its source",
    "drop_last": "an epoch ends with the last batch that all towers can fill",
    "sampler": "a stream has the order of its source",
    "batch_sampler": "batches are cut into towers here; use batch_size",
    "generator": "every random stream comes from seed; use seed",
    "worker_init_fn": "its effects would depend on the number of loader processes; use the source",
    "in_order": "batches always come in order",
    "persistent_workers": "loader processes are started for each epoch",
}
_FULL, _ENDED, _FAILED = range(3)
_HINT = "a source that depends on tower, T, epoch and seed alone, not on process, rank or time (docs/data.md)"


class StreamLoader:
    """Loads this worker's rows of each global batch from a stream in T shards, one for each tower.

    The examples of a tower depend on (seed, T, epoch) alone, not on the workers. While an example is read,
    torch's CPU generator, Python's `random` and NumPy's legacy generator are seeded from (seed, epoch, tower,
    number in the shard); without the tower for an iterable that gives all examples to every tower, so that it
    may shuffle them. While `collate_fn` runs, they are seeded from (seed, position, tower).

    An iteration yields the rest of the current epoch, from `position` on; see `TowerLoader` for which batches
    count. The epoch ends on all workers as soon as some tower cannot fill its rows; what the other shards
    still hold is not read. To find that out, workers exchange a message of some bytes before each batch, so
    request the next batch between two steps.

    Before the first batch, each worker reads the first rows of tower 0 twice, the second time after those of
    the last tower, and all compare them. A checkpoint holds their checksum, and a run that continues with
    another stream gets a warning.

    After a resume in the middle of an epoch, or for towers that move to another worker, earlier examples are
    read and skipped, unless `source` has a parameter `start`.

    Args:
        source: one of

            - `make_shard(tower, num_towers, epoch, seed)` -> an iterable of a tower's examples. If it has a
              parameter `start`, it must skip that many examples itself.
            - an `IterableDataset`, such as a webdataset: each tower has a copy, which sees worker `tower` of
              `num_towers` in `torch.utils.data.get_worker_info()`. If it does not call that, each tower takes
              every T-th example. If it has a method `set_epoch`, that is called with the epoch.
            - a Hugging Face `datasets.IterableDataset`, split by `split_dataset_by_node`.
            - another iterable that can be iterated over again: each tower takes every T-th example.
        batch_size: rows of the global batch, at least T.
        towers: a `samestep.Towers`.
        seed: the seed of all random streams.
        collate_fn: a tower's list of examples -> its batch; torch's `default_collate` by default.
        dataloader_options: passed on to `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`,
            `prefetch_factor`, `multiprocessing_context`, `timeout`.

    Raises:
        ConfigError: the source cannot be split, a batch has fewer rows than towers, or an option cannot be
            set here.
        BatchError: while iterating, a shard is too short for an epoch's first batch.
        LoaderError: as for `TowerLoader`.

    Example:
        >>> def make_shard(tower, num_towers, epoch, seed):
        ...     return range(tower, 7, num_towers)
        >>> towers = Towers(torch.nn.Linear(1, 1), 2)
        >>> loader = StreamLoader(make_shard, 3, towers)
        >>> for batch in loader:
        ...     print(batch.position, batch.rows, batch.slices)
        0 3 {0: tensor([0, 2]), 1: tensor([1])}
        1 3 {0: tensor([4, 6]), 1: tensor([3])}
        >>> loader.position, loader.epoch
        (2, 1)
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        towers: Towers,
        *,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **dataloader_options: Any,
    ) -> None:
        check_source(source)
        check_options(dataloader_options, "StreamLoader", _OWNED)
        check_towers(towers)
        if collate_fn is not None:
            check_callable("collate_fn", collate_fn, "a function of a list of examples")
        num_towers = towers.placement.num_towers
        self.source = source
        meaning = "the number of towers, because each reads a shard"
        self.batch_size = whole("batch_size", batch_size, num_towers, meaning)
        self.seed = whole("seed", seed)
        self._towers = towers
        self._collate_fn = collate_fn
        self._options = dataloader_options
        self._progress = Progress(towers, towers.job)
        self._first_epoch, self._starts = 0, [0]  # positions of that epoch and those after it
        self._checksum: int | None = None
        self._is_checked = False  # whether all workers have compared its first rows, since a state was loaded
        self._has_read = False  # whether this process has read them, before or after
        self._batches: Generator[LocalBatch] | None = None
        self._reading(towers.placement)  # which checks the options

    @property
    def position(self) -> int:
        """Batches used over the whole run, all epochs together."""
        return self._progress.position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after an epoch's last batch it grows only when the iteration ends."""
        return self._place(self.position)[0]

    def _place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the batches of this epoch before it."""
        epoch = bisect_right(self._starts, position) - 1
        return self._first_epoch + epoch, position - self._starts[epoch]

    def state_dict(self) -> dict[str, Any]:
        """Return position, epoch and the settings they depend on.

        There is a warning if a run that continues from it would use other batches, see docs/data.md.
        """
        self._progress.check_used()
        return self._state()

    def _state(self, *, in_loop: bool = False) -> dict[str, Any]:
        """Return the state; `in_loop` to repeat a step, with the batch that its loop has taken."""
        position = self._progress.num_taken if in_loop else self.position
        epoch, num_before = self._place(position)
        place = {"position": position, "epoch": epoch, "batches_of_epoch": num_before}
        return {**place, "first_examples": self._checksum, **self._progress.state, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in a `state_dict`, with any number of workers.

        Raises:
            ConfigError: the state is from a run with another batch size, seed or T, or it is no state.
        """
        check_state(state, self._settings)
        names = ("position", "epoch", "batches_of_epoch")
        position, epoch, num_before = (number_in(state, name) for name in names)
        checksum = None if state.get("first_examples") is None else number_in(state, "first_examples")
        self._first_epoch, self._starts = epoch, [position - num_before]
        self._is_checked = False  # on all workers, those that join included
        if not self._has_read:
            self._checksum = checksum
        self._drop_iteration()
        self._progress.load(position, state)

    def next_batch(self) -> LocalBatch | None:
        """Return the next batch, or None at the end of an epoch; the call after that begins the next epoch.

        Does what an iteration does, but always continues from the current position: for the step function of
        a `samestep.Elastic`, which is repeated from its beginning if a worker is lost.

        Raises:
            BatchError, DisagreementError, UsageError: as in an iteration.
        """
        if self._batches is None:
            self._batches = iter(self)
        batch = None
        try:
            batch = next(self._batches, None)
        finally:
            if batch is None:
                self._drop_iteration()
        return batch

    def _drop_iteration(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @property
    def _settings(self) -> dict[str, int]:
        num_towers = self._towers.placement.num_towers
        return {"batch_size": self.batch_size, "seed": self.seed, "towers": num_towers}

    def __iter__(self) -> Generator[LocalBatch]:
        """Iterate over the rest of the current epoch.

        Raises:
            BatchError: a shard is too short for the epoch's first batch.
            DisagreementError: another worker could not read its shards.
            UsageError: tower 0's shard differs when it is read again, a step is open, or another iteration
                yielded a batch since the last one.
        """
        expected = self._progress.begin()
        number = self._progress.num_begun
        if not self._is_checked:
            self._check_source()
        while True:
            # After a new placement, open the shards of the new towers, and skip the examples already used.
            placement = self._towers.placement
            with closing(self._read(placement)) as batches:
                while self._towers.placement == placement:
                    self._check_unmoved(expected, number)
                    batch = self._next(batches, expected)
                    if batch is None:
                        self._starts.append(expected)
                        self._progress.end_epoch()
                        return
                    expected += 1
                    with self._progress.handing_out():
                        yield batch

    def _next(self, batches: Iterator[dict[int, Any]], position: int) -> LocalBatch | None:
        """Return the next batch, or None on all workers if some tower cannot fill its rows."""
        self._towers._check_no_step("read the next batch")
        slices: dict[int, Any] = {}
        error: Exception | None = None
        try:
            slices = next(batches)
        except Exception as found:
            error = found
        ended = next((each for each in slices.values() if isinstance(each, Ended)), None)
        epoch, num_before = self._place(position)
        if (ended := self._first_ended(ended, error)) is None:
            place = repr((self.seed, epoch, num_before, self.batch_size))
            used = partial(self._progress.use, position)
            return LocalBatch(self.batch_size, slices, position, zlib.crc32(place.encode()), used=used)
        if num_before == 0:
            num_towers = self._towers.placement.num_towers
            rows = even_ranges(self.batch_size, num_towers)[ended.tower]
            raise BatchError(
                f"epoch {epoch} of the stream has no batch: tower {ended.tower}'s shard ended after "
                f"{ended.num_examples} examples, but a batch takes {len(rows)} from it: expected a stream "
                f"that gives each of {num_towers} towers enough rows for a batch, such as {num_towers} files "
                "or more"
            )
        return None

    def _first_ended(self, ended: Ended | None, error: Exception | None) -> Ended | None:
        """Return the first shard of all workers' that has ended; raise on all workers if one met an error."""
        job, where = self._towers.job, f"batch {self._progress.num_taken} of the stream"
        kind = _FAILED if error is not None else _FULL if ended is None else _ENDED
        own = (kind, 0, 0) if ended is None else (kind, ended.tower, ended.num_examples)
        everyone = gather_rows(
            job.transport, torch.tensor([own], device="cpu"), [1] * job.world_size, where
        ).tolist()
        if any(kind == _FAILED for kind, _, _ in everyone):
            agree(job, {}, where=where, error=error)
        return next((Ended(tower, count) for kind, tower, count in everyone if kind == _ENDED), None)

    def _read(self, placement: Placement) -> Generator[dict[int, Any]]:
        """Yield this worker's slices, batch after batch, with `Ended` for shards that have ended."""
        read, num_items = self._reading(placement)
        own = placement.rows(self._towers.job.rank, self.batch_size)
        with closing(read()) as items:
            while True:
                batch = [next(items) for _ in range(num_items)]
                yield dict(zip(own, batch, strict=False))

    def _reading(self, placement: Placement) -> tuple[Callable[[], Generator[Any]], int]:
        """Return a function that reads on from the position, and its number of items for each batch."""
        own = placement.rows(self._towers.job.rank, self.batch_size)
        num_processes = min(self._options.get("num_workers", 0), len(own))
        position = self._progress.num_taken
        epoch, num_before = self._place(position)
        read = self._reading_of(own, num_processes, epoch, position, num_before)
        return read, len(own) + -len(own) % max(num_processes, 1)

    def _reading_of(
        self, rows: Mapping[int, range], num_processes: int, epoch: int, position: int, num_before: int
    ) -> Callable[[], Generator[Any]]:
        reader = ShardReader(
            self.source,
            {tower: len(part) for tower, part in rows.items()},
            self._towers.placement.num_towers,
            self.seed,
            epoch,
            position,
            num_before,
            self._collate_fn,
        )
        return reading(reader, self._towers.job, self._options, num_workers=num_processes)

    def _check_source(self) -> None:
        """Read the run's first rows of tower 0 twice on all workers, and check that they are the same.

        The second time, those of the last tower are read before, in the same process.
        """
        checksum, error = 0, None
        try:
            checksum = self._first_checksum([0])
            if checksum != self._first_checksum([self._towers.placement.num_towers - 1, 0]):
                raise UsageError(
                    "StreamLoader: tower 0 gets different examples when they are read again: expected "
                    f"{_HINT}"
                )
        except Exception as found:
            error = found
        name = "checksum of tower 0's first examples"
        must_match = {name: checksum, f"?{name}: expected {_HINT}": checksum}
        agree(self._towers.job, must_match, where="StreamLoader", error=error)
        is_other = self._checksum not in (None, checksum) and not self._has_read
        if is_other and self._towers.job.is_first:
            warn(
                "StreamLoader: the stream begins with different examples than in the run that is continued: "
                f"expected the same CPU model, and {_HINT}; ignore this if the program changes the source in "
                "the course of a run"
            )
        self._checksum, self._is_checked, self._has_read = checksum, True, True

    def _first_checksum(self, towers: Sequence[int]) -> int:
        """Read the first batches of some towers; return the fingerprint of the last of them."""
        ranges = Placement.even(self._towers.placement.num_towers, 1).rows(0, self.batch_size)
        rows = {tower: ranges[tower] for tower in towers}
        num_processes = min(self._options.get("num_workers", 0), 1)
        with closing(self._reading_of(rows, num_processes, 0, 0, 0)()) as items:
            *_, batch = islice(items, len(rows))
        return fingerprint(Whole(batch))

    def _check_unmoved(self, expected: int, number: int) -> None:
        if not self._progress.is_at(expected, number):
            raise UsageError(
                f"position is {self._progress.num_taken}, this iteration is at {expected}: after "
                "load_state_dict, or starting another iteration, do not continue an old one"
            )
