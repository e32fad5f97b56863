"""Workers agree: on values that must be the same on all, and on what worker 0 reads or decides alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import DisagreementError, Error, LostWorkerError
from samestep.workers.collectives import broadcast, gather_objects
from samestep.workers.job import Job

__all__ = ["agree", "difference", "from_first_worker"]

T = TypeVar("T")
Values = Mapping[str, Any]


def agree(
    job: Job, must_match: Values, *, where: str, error: BaseException | None = None, message: Any = None
) -> list[Any]:
    """Raise on every worker unless all have the same values and none has an error; return all messages.

    All workers must call this. `error` is what went wrong on this worker before: it is raised here, and as a
    `DisagreementError` elsewhere. Messages may differ. `where` begins the error, such as "step 3".
    """
    own = (dict(must_match), None if error is None else _in_words(error), message)
    all_values = gather_objects(job.transport, own, where)
    if error is not None:
        raise error
    failed = [f"worker {worker} failed: {text}" for worker, (_, text, _) in enumerate(all_values) if text]
    if failed:
        raise DisagreementError(f"{where}: {'; '.join(failed)}")
    sentence = difference([values for values, _, _ in all_values])
    if sentence:
        raise DisagreementError(f"{where}: {sentence}")
    return [each for _, _, each in all_values]


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def difference(all_values: Sequence[Values]) -> str | None:
    """Say which workers differ from the others in the first value that differs.

    >>> difference([{"towers": 8}, {"towers": 7}, {"towers": 8}])
    'worker 1 has towers = 7, the others have 8'
    """
    for name in all_values[0]:
        values: list[Any] = [seen.get(name) for seen in all_values]
        if all(value == values[0] for value in values):
            continue
        if not isinstance(values[0], (list, tuple)):
            return _in_a_sentence(name, values)
        for index, entries in enumerate(zip_longest(*values, fillvalue="nothing")):
            if any(entry != entries[0] for entry in entries):
                return _in_a_sentence(f"{name}[{index}]", entries)
    return None


def _in_a_sentence(name: str, values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    usual, count = Counter(texts).most_common(1)[0]
    if count == 1 or 2 * count == len(texts):
        return ", ".join(f"worker {worker} has {name} = {text}" for worker, text in enumerate(texts))
    odd = [f"worker {worker} has {name} = {text}" for worker, text in enumerate(texts) if text != usual]
    return f"{', '.join(odd)}, the others have {usual}"


def from_first_worker(job: Job, work: Callable[[], T]) -> T:
    """Do something on worker 0 alone, and return its result on all workers, which must all call this.

    The result is a nest of tensors in host memory and values that can be pickled. An `Error` is raised on all
    workers; after any other exception of worker 0 the others raise a `LostWorkerError`.
    """
    if job.world_size == 1:
        return work()
    result: Any = None
    error: Error | None = LostWorkerError("worker 0 failed")
    try:
        if job.is_first:
            result, error = work(), None
    except Error as raised:
        error = raised
    finally:
        error, result = _share((error, result), job)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _share(nest: Any, job: Job) -> Any:
    """Send worker 0's nest to all, its tensors by themselves: pickled they would need twice the memory."""
    what = "what worker 0 found"
    outline = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), nest) if job.is_first else None
    outline = gather_objects(job.transport, outline, what)[0]
    if not job.is_first:
        nest = pytree.tree_map_only(Tensor, lambda meta: torch.empty_like(meta, device="cpu"), outline)
    tensors = [t for t in pytree.tree_leaves(nest) if isinstance(t, Tensor) and t.numel()]
    values = [tensor.contiguous() for tensor in tensors]
    broadcast(job.transport, values, what)
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)
    return nest
