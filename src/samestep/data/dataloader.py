"""The DataLoader of torch under samestep's loaders: which options they pass on, and how they read it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from samestep.arguments import whole
from samestep.data.loader_processes import (
    default_start_method,
    read_through,
    start_loader_process,
    timeout_option,
)
from samestep.errors import ConfigError
from samestep.workers.job import Job

__all__ = ["check_options", "reading"]

_OWNED = {
    "sampler": "the order of an epoch depends on seed and epoch alone; use shuffle, or order",
    "batch_sampler": "batches are cut into towers here; use batch_size and drop_last, or order",
    "generator": "every random stream comes from seed; use seed",
    "worker_init_fn": "its effects would depend on the number of loader processes; use the dataset",
    "in_order": "batches always come in order",
}


def check_options(options: Mapping[str, Any], loader: str, owned: Mapping[str, str] = _OWNED) -> None:
    """Refuse options of DataLoader that samestep's loaders set themselves.

    Raises:
        ConfigError: one of these options is passed.
    """
    for name in options:
        if name in owned:
            raise ConfigError(f"{name} is not an option of {loader}: {owned[name]}")
    if "num_workers" in options:
        whole("num_workers", options["num_workers"], 0, "the loader processes of each worker")


def check_towers(towers: object) -> None:
    """Refuse anything without a placement as `towers`, such as a model."""
    if not hasattr(towers, "placement"):
        raise ConfigError(f"towers is a {type(towers).__name__}: expected the samestep.Towers of the model")


def reading(
    dataset: Dataset[Any], job: Job, options: Mapping[str, Any], **more: Any
) -> Callable[[], Generator[Any]]:
    """Return a function that reads a dataset through a DataLoader, without batching or collating."""
    options = {"num_workers": 0, "persistent_workers": False, **options, **more}
    timeout_s = options.pop("timeout", 0) or job.timeout_s
    if options["num_workers"] and options.get("multiprocessing_context") is None:
        options["multiprocessing_context"] = default_start_method()
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_unchanged,
        # Without a generator, DataLoader draws a number from torch's global generator each epoch.
        generator=torch.Generator(),
        worker_init_fn=start_loader_process,
        timeout=timeout_option(options["num_workers"], options["persistent_workers"], timeout_s),
        **options,
    )
    return partial(read_through, loader, job.rank, timeout_s)


def _unchanged(batch: Any) -> Any:
    return batch
