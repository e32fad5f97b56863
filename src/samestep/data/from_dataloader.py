"""The arguments of a torch DataLoader, as arguments for a `TowerLoader`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from samestep.errors import ConfigError

__all__ = ["options_of"]


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments.

    Raises:
        ConfigError: a TowerLoader has no counterpart of some argument.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"loader is a {type(loader).__name__}: expected a torch.utils.data.DataLoader")
    _check_can_be_kept(loader)
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    options: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "collate_fn": collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "persistent_workers": loader.persistent_workers,
        "multiprocessing_context": loader.multiprocessing_context,
        **_order_of(loader),
    }
    return options | ({"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {})


def _order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    num_examples = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == num_examples:
        return {"shuffle": True}
    return {"order": partial(_iterate, sampler)}


def _iterate(sampler: Iterable[Any], _: int, epoch: int) -> list[Any]:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return list(sampler)


def _check_can_be_kept(loader: DataLoader[Any]) -> None:
    sampler = loader.sampler
    streams = "every random stream comes from seed here, so leave it out of the DataLoader"
    found = {
        "an IterableDataset": (
            isinstance(loader.dataset, IterableDataset),
            "give it to samestep.StreamLoader",
        ),
        "batch_size=None": (
            loader.batch_size is None and loader.batch_sampler is None,
            "its dataset gives whole batches; samestep.LocalBatch takes any (docs/data.md)",
        ),
        "a batch_sampler of its own": (
            type(loader.batch_sampler) is not BatchSampler or loader.batch_sampler.sampler is not sampler,
            "batches are cut into towers here; use TowerLoader(dataset, batch_size, towers, order=...)",
        ),
        "a DistributedSampler": (
            isinstance(sampler, DistributedSampler),
            "it gives each process a part that depends on the number of processes; use shuffle=True",
        ),
        "a sampler with a generator": (
            isinstance(getattr(sampler, "generator", None), torch.Generator),
            "its order depends on earlier draws; without a generator it draws from the global generators, "
            "which are seeded from (seed, epoch)",
        ),
        "a generator": (loader.generator is not None, streams),
        "a worker_init_fn": (
            loader.worker_init_fn is not None,
            "its effects would depend on the number of loader processes; use the dataset",
        ),
        "in_order=False": (not loader.in_order, "batches always come in order"),
    }
    for what, (has_it, remedy) in found.items():
        if has_it:
            raise ConfigError(f"loader has {what}, which a TowerLoader cannot keep: {remedy}")
