"""Checks that values are the same on all workers, and sends results of one worker to others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import (
    AbandonedError,
    DisagreementError,
    Error,
    LostWorkerError,
    one_line,
    who_has_what,
)
from samestep.workers.collectives import broadcast, gather_objects, unbroken
from samestep.workers.job import Job

__all__ = ["agree", "difference", "from_first_worker", "hand_over"]

T = TypeVar("T")
Values = Mapping[str, Any]


def agree(
    job: Job, must_match: Values, *, where: str, error: BaseException | None = None, message: Any = None
) -> list[Any]:
    """Raise on every worker unless all have the same values and none has an error; return all messages.

    All workers must call this. `error` is an earlier error on this worker: it is raised here, and on other
    workers as an `AbandonedError` if it is one, otherwise as a `DisagreementError`. Messages may differ
    between workers. `where` begins the error, such as "step 3".
    """
    own = (dict(must_match), None if error is None else _describe(error), message)
    all_values = gather_objects(job.transport, own, where)
    if error is not None:
        raise error
    failed = [f"worker {worker} {text}" for worker, (_, text, _) in enumerate(all_values) if text]
    if failed:
        abandoned = all(text is None or text.startswith(_ABANDONED) for _, text, _ in all_values)
        raise (AbandonedError if abandoned else DisagreementError)(f"{where}: {'; '.join(failed)}")
    sentence = difference([values for values, _, _ in all_values])
    if sentence:
        raise DisagreementError(f"{where}: {sentence}")
    return [each for _, _, each in all_values]


_ABANDONED = "abandoned the step"


def _describe(error: BaseException) -> str:
    if isinstance(error, AbandonedError):
        return f"{_ABANDONED}{error}"
    return f"failed: {error}" if isinstance(error, Error) else f"failed: {type(error).__name__}: {error}"


def difference(all_values: Sequence[Values]) -> str | None:
    """Describe the first value that differs: which workers have which; None if all are the same.

    >>> difference([{"towers": 8}, {"towers": 7}, {"towers": 8}])
    'worker 1 has towers = 7, the others have 8'
    >>> difference([{"layer": {"0": "Linear"}}, {"layer": {"0": "Linear", "1": "ReLU"}}])
    'worker 0 has layer 1 = nothing, worker 1 has layer 1 = ReLU'

    A value named "?NAME: HINT" may differ; if the value named NAME differs as well, the hint is added.
    """
    names = dict.fromkeys(itertools.chain(*all_values))
    values: dict[str, list[Any]] = {n: [seen.get(n, _NOTHING) for seen in all_values] for n in names}
    differing = [name for name, found in values.items() if not _are_all_equal(found)]
    first = next((name for name in differing if name[0] != "?"), None)
    if first is None:
        return None
    hints = "".join(f"; {name.partition(': ')[2]}" for name in differing if name.startswith(f"?{first}: "))
    return who_has_what(*_first_difference(first, values[first])) + hints


_NOTHING = "nothing"
"""Shown for a value that a worker does not have."""


def _first_difference(name: str, found: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Return the name and values of the first entry that differs, or is in a different place."""
    parts = [_parts(each) for each in found]
    for key in dict.fromkeys(itertools.chain(*parts)):
        entries = [each.get(key, _NOTHING) for each in parts]
        if any(entry != entries[0] for entry in entries):
            return f"{name}{key}", entries
    for place, keys in enumerate(zip(*parts, strict=True)):
        if len(set(keys)) > 1:
            return f"{name} number {place}", [key.strip() for key in keys]
    return name, found


def _parts(value: Any) -> Mapping[str, Any]:
    """Return the entries of a mapping or a list, by the suffix for its name; other values have none."""
    if isinstance(value, Mapping):
        return {f" {key}": part for key, part in value.items()}
    return {f"[{n}]": part for n, part in enumerate(value)} if isinstance(value, (list, tuple)) else {}


def _are_all_equal(values: Sequence[Any]) -> bool:
    """Whether all values are equal, including the order of mappings."""
    first = values[0]
    return all(
        bool(each == first) and not (isinstance(each, Mapping) and list(each) != list(first))
        for each in values
    )


def from_first_worker(job: Job, work: Callable[[], T], what: str = "what worker 0 found") -> T:
    """Call `work` on worker 0 alone, and return its result on all workers; all workers must call this.

    `what` names the work in an error. The result is a nest of CPU tensors and values that can be pickled. If
    `work` raises an `Error`, all workers raise it; after any other exception of worker 0 the others raise a
    `LostWorkerError`.
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
    except Exception as raised:
        error = LostWorkerError(one_line(f"worker 0 failed ({type(raised).__name__}: {raised})"))
        raise
    finally:
        with unbroken(job.transport, what):
            error, result = _send_nest(
                (error, result), job, 0, what, lambda values: broadcast(job.transport, values, what)
            )
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def hand_over(nest: Any, job: Job, source: int, targets: Sequence[int], what: str) -> Any:
    """Send one worker's nest to some others, which return it; all workers must call this.

    Args:
        nest: CPU tensors and values that can be pickled, on the worker `source`; None on others.
        job: this worker's job.
        source: the worker that sends.
        targets: the workers that receive.
        what: the message's name in an error.

    Returns:
        The nest on `source` and `targets`, None on other workers.
    """

    def send(values: list[Tensor]) -> None:
        outgoing = dict.fromkeys(targets, values) if job.rank == source else {}
        incoming = {source: values} if job.rank in targets else {}
        with unbroken(job.transport, what):
            job.transport.post(outgoing, incoming, what).wait()

    return _send_nest(nest, job, source, what, send, is_wanted=job.rank in targets)


def _send_nest(
    nest: Any,
    job: Job,
    source: int,
    what: str,
    send: Callable[[list[Tensor]], None],
    *,
    is_wanted: bool = True,
) -> Any:
    """Send a worker's nest; dense tensors are sent separately, because pickling takes twice the memory."""
    is_source = job.rank == source
    outline = pytree.tree_map(lambda e: e.to("meta") if _is_dense(e) else e, nest) if is_source else None
    outline = gather_objects(job.transport, outline, what)[source]
    if not is_source and is_wanted:
        nest = pytree.tree_map(lambda e: torch.empty_like(e, device="cpu") if _is_dense(e) else e, outline)
    tensors = [tensor for tensor in pytree.tree_leaves(nest) if _is_dense(tensor) and tensor.numel()]
    values = [tensor.contiguous() for tensor in tensors]
    send(values)
    for tensor, value in zip(tensors, values, strict=True):
        if value is not tensor:
            tensor.copy_(value)
    return nest


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
