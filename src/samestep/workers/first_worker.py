"""What worker 0 finds, for all workers: no two of them can see different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import Error, LostWorkerError
from samestep.workers.job import Job

__all__ = ["from_first_worker"]

T = TypeVar("T")


def from_first_worker(job: Job, work: Callable[[], T]) -> T:
    """Do something on worker 0, and return what it returns on all workers.

    Args:
        job: all its workers must call this.
        work: returns a nest of tensors in host memory and values that can be pickled.

    Raises:
        Error: what `work` raised on worker 0, the same on all.
        LostWorkerError: on the others, if it raised something else.
    """
    if job.world_size == 1:
        return work()
    error: Error | None = None
    result: Any = None
    if job.is_first:
        try:
            result = work()
        except Error as raised:
            error = raised
        except BaseException:
            _share((LostWorkerError("worker 0 failed"), None), job)
            raise
    error, result = _share((error, result), job)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _share(nest: Any, job: Job) -> Any:
    """Send worker 0's nest to all, its tensors one by one: pickled they would need twice the memory."""
    with job.together("what worker 0 found"):
        return _broadcast(nest, job)


def _broadcast(nest: Any, job: Job) -> Any:
    outline = [pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), nest) if job.is_first else None]
    dist.broadcast_object_list(outline, 0)
    if not job.is_first:
        nest = pytree.tree_map_only(Tensor, lambda meta: torch.empty_like(meta, device="cpu"), outline[0])
    for tensor in pytree.tree_leaves(nest):
        if isinstance(tensor, Tensor) and tensor.numel():
            values = tensor.contiguous()
            dist.broadcast(values.reshape(-1).view(torch.uint8), 0)
            tensor.copy_(values)
    return nest
