"""The T shards of a stream, one for each tower, whichever worker runs it."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils

from samestep.arguments import parameters_of
from samestep.errors import ConfigError, UsageError, one_line
from samestep.streams import GlobalStreams, seed_globals, stream_seed

__all__ = ["Shard", "Source", "check_source", "has_indices", "open_shard", "seen_as"]

_CPU = torch.device("cpu")

Source: TypeAlias = Callable[..., Iterable[Any]] | Iterable[Any]
"""make_shard(tower, num_towers, epoch, seed) -> a shard's examples, or an iterable of all examples."""


class VirtualWorker:
    """The result of `torch.utils.data.get_worker_info` while a tower's shard is read: worker t of T.

    It records whether the dataset has read `id` or `num_workers`, as one that yields only its part does. Up
    to then, the global generators draw the same numbers for all towers, so that a dataset may shuffle first.
    One that reads `seed` alone is read again from its beginning, with a seed that is the same for all towers.

    Args:
        tower: the tower's index t.
        num_towers: T.
        base_seed: the same for all towers.

    Attributes:
        dataset: the tower's copy.
        was_asked: whether the dataset has read its part.
        has_own_seed: whether `seed` is another one for each tower.
    """

    def __init__(self, tower: int, num_towers: int, base_seed: int) -> None:
        self.part = tower, num_towers
        self.base_seed = base_seed
        self.dataset: Any = None
        self.was_asked = False
        self.has_own_seed = True
        self._gave_own_seed = False

    @property
    def id(self) -> int:
        """The tower's index t."""
        self._note()
        return self.part[0]

    @property
    def num_workers(self) -> int:
        """The number of towers T."""
        self._note()
        return self.part[1]

    @property
    def seed(self) -> int:
        """As in DataLoader's processes, a base seed plus the worker's id."""
        self._gave_own_seed |= self.has_own_seed
        return self.base_seed + self.part[0] * self.has_own_seed

    @property
    def must_share_seed(self) -> bool:
        """Whether the dataset has read a seed of this tower, but not its part."""
        return self._gave_own_seed and not self.was_asked

    def __copy__(self) -> VirtualWorker:
        """Return this one, which notices what is read."""
        return self

    def __deepcopy__(self, _: Any) -> VirtualWorker:
        """Return this one."""
        return self

    def _note(self) -> None:
        if not self.was_asked:
            self.was_asked = True
            seed_globals(self.base_seed + self.part[0], _CPU)


@dataclass(frozen=True)
class Shard:
    """One tower's examples in an epoch.

    Attributes:
        examples: the examples from number `start` on.
        worker: the loader process that the dataset sees; None for none.
        start: how many examples the source has skipped itself.
    """

    examples: Iterator[Any]
    worker: VirtualWorker | None = None
    start: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether all towers read the same examples, and each takes every T-th."""
        return self.worker is not None and not self.worker.was_asked


@contextmanager
def seen_as(worker: Any) -> Iterator[None]:
    """Make `get_worker_info` return this, and not the real process, which reads several towers."""
    # torch sets it only in DataLoader's processes; T of those on each worker would read all shards:
    # https://github.com/pytorch/pytorch/blob/main/torch/utils/data/_utils/worker.py
    before, _utils.worker._worker_info = _utils.worker._worker_info, worker
    try:
        yield
    finally:
        _utils.worker._worker_info = before


def open_shard(source: Source, tower: int, num_towers: int, *, epoch: int, seed: int, start: int) -> Shard:
    """Open one tower's shard, from its first example; from `start` if the source has such a parameter."""
    if not isinstance(source, Iterable):
        skips = {"start": start} if _has_start(source) else {}
        examples = source(tower, num_towers, epoch, seed, **skips)
        if not isinstance(examples, Iterable):
            raise ConfigError(
                f"{_name_of(source)} returned a {type(examples).__name__}: expected an iterable of the "
                "tower's examples, such as a list or a generator"
            )
        return Shard(iter(examples), start=start if skips else 0)
    if _is_hugging_face(source):
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(source, tower, num_towers)
        part.set_epoch(epoch)
        return Shard(iter(part))
    worker = VirtualWorker(tower, num_towers, stream_seed(seed, "shard", epoch))
    reopen = partial(_opened, source, worker, epoch)
    return Shard(_own_examples(reopen(), worker, reopen), worker)


def _opened(source: Iterable[Any], worker: VirtualWorker, epoch: int) -> Iterator[Any]:
    """Return an iterator over a source's own copy, which sees the worker."""
    own = worker.dataset = _copied(source)
    seed_globals(worker.base_seed, _CPU)
    if hasattr(own, "set_epoch"):
        own.set_epoch(epoch)
    with seen_as(worker):
        return iter(own)


def _copied(source: Iterable[Any]) -> Any:
    """Return a copy for one tower and epoch, as in DataLoader's processes: a source may have state."""
    try:
        return copy.deepcopy(source)
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(
            f"source is a {type(source).__name__} that cannot be copied for each tower ({why}): expected one "
            "that opens files and connections in its __iter__, or make_shard(tower, num_towers, epoch, seed) "
            "-> iterable"
        ) from error


def _own_examples(
    examples: Iterator[Any], worker: VirtualWorker, reopen: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """Yield all examples if the dataset selects this tower's part itself, or else every T-th."""
    start, found = GlobalStreams.capture(_CPU), enumerate(examples)
    first = list(itertools.islice(found, 1))
    if worker.must_share_seed:
        worker.has_own_seed = False
        first, found = [], enumerate(reopen())
        start.restore()
    gives_part, own = True, []
    tower, num_towers = worker.part
    for number, example in itertools.chain(first, found):
        if number == 0:
            gives_part = worker.was_asked
        elif gives_part != worker.was_asked:
            raise UsageError(
                f"{type(worker.dataset).__name__} called get_worker_info() after its first example: expected "
                "the call before it, or none at all, so that each tower takes every T-th example"
            )
        if gives_part or number % num_towers == tower:
            own.append(example)
        # All T are read before one is yielded, so that all towers read each under the same random numbers.
        if gives_part or number % num_towers == num_towers - 1:
            yield own.pop()
    yield from own


def has_indices(dataset: object) -> bool:
    """Whether a dataset has `__getitem__`: torch's base class defines one that raises, for streams too."""
    return getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)


def check_source(source: Any) -> None:
    """Refuse a source that cannot be read as T shards.

    Raises:
        ConfigError: see the messages.
    """
    name = type(source).__name__
    if isinstance(source, DataLoader):
        raise ConfigError(
            "source is a DataLoader: pass its dataset to StreamLoader, or, if that has indices, use "
            "TowerLoader.from_dataloader"
        )
    if hasattr(source, "__len__") and has_indices(source):
        raise ConfigError(f"source is a {name}, which has a length and indices: use a TowerLoader")
    if isinstance(source, Iterator) and not isinstance(source, IterableDataset):
        raise ConfigError(
            f"source is a {name}, which can be read only once: expected an IterableDataset, another "
            "iterable, or make_shard(tower, num_towers, epoch, seed) -> iterable"
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise ConfigError(
            f"source is a {name}: expected an iterable, or make_shard(tower, num_towers, epoch, seed) -> "
            "iterable"
        )
    if not isinstance(source, Iterable):
        _check_parameters(source)


def _check_parameters(make_shard: Callable[..., Any]) -> None:
    skips = {"start": 0} if _has_start(make_shard) else {}
    try:
        inspect.signature(make_shard).bind(0, 1, 0, 0, **skips)
    except TypeError as error:
        raise ConfigError(
            f"{_name_of(make_shard)} cannot be called with (tower, num_towers, epoch, seed) ({error}): "
            "expected a function with these parameters, and perhaps start"
        ) from None
    except ValueError:  # Python knows no signature of it
        pass


def _name_of(make_shard: Callable[..., Any]) -> str:
    return getattr(make_shard, "__name__", type(make_shard).__name__)


def _is_hugging_face(source: Any) -> bool:
    return type(source).__module__.partition(".")[0] == "datasets"


def _has_start(make_shard: Callable[..., Any]) -> bool:
    try:
        return "start" in parameters_of(make_shard)
    except ValueError:  # Python knows no signature of it
        return False
