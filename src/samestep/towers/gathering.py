"""What each tower has kept, gathered from all workers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from samestep.errors import UsageError, one_line, shown
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["gather_values"]


def gather_values(job: Job, values: Mapping[int, Any], towers: Sequence[int], where: str) -> list[Any]:
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


def _packed(values: Mapping[int, Any], towers: Sequence[int]) -> bytes | str:
    """Return a worker's values as bytes, or what is wrong with them."""
    if not isinstance(values, Mapping):
        return f"has a {type(values).__name__}: expected a dict of values by tower.index"
    if set(values) != set(towers):
        expected = f"expected one for each of its towers {[*towers]}, by tower.index"
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
