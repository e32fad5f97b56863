"""What each tower has kept, gathered from all workers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from samestep.errors import UsageError, one_line, shown
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["Values", "gather_values"]


Values: TypeAlias = Mapping[int, Any] | Sequence[Any]
"""A worker's values by its towers' indices, or one for each of its towers, in order."""


def gather_values(job: Job, values: Values, towers: Sequence[int], where: str) -> list[Any]:
    """Return the values of all towers, in order; `towers` are this worker's.

    All workers get copies, of their own towers' values, too.

    Raises:
        UsageError: on all workers, if one has not a value for each of its towers, or cannot send them.
    """
    gathered: dict[int, Any] = {}
    for worker, sent in enumerate(gather_objects(job.transport, _packed(values, towers), where)):
        if isinstance(sent, str):
            raise UsageError(f"{where}: worker {worker} {sent}")
        gathered |= torch.load(io.BytesIO(sent), map_location=_moved_to(job), weights_only=False)
    return [gathered[tower] for tower in sorted(gathered)]


def _packed(values: Values, towers: Sequence[int]) -> bytes | str:
    """Return a worker's values as bytes, or what is wrong with them."""
    expected = (
        f"expected one for each of its towers {[*towers]}, in a dict by tower.index, or in order in a list"
    )
    if isinstance(values, list | tuple):
        if len(values) != len(towers):
            return f"has {len(values)} values: {expected}"
        values = dict(zip(towers, values, strict=True))
    if not isinstance(values, Mapping):
        return f"has a {type(values).__name__} of values: {expected}"
    if set(values) != set(towers):
        return f"has values for {shown([*values])}: {expected}"
    memory = io.BytesIO()
    try:
        torch.save(dict(values), memory)
    except Exception as error:  # a user's object may raise anything
        return f"has a value that cannot be pickled ({one_line(f'{type(error).__name__}: {error}')})"
    return memory.getvalue()


def _moved_to(job: Job) -> Any:
    """Return the function for `torch.load` that puts what was on a GPU on this worker's."""
    return lambda storage, place: storage if place == "cpu" else storage.to(device=job.device)
