"""Workers agree before they exchange: who differs, and how, in one sentence on every worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from samestep.errors import DisagreementError, Error
from samestep.job import Job

__all__ = ["agree", "difference"]

Facts = Mapping[str, Any]
_ERROR = "error"


def agree(job: Job, facts: Facts, *, where: str, error: Error | None = None) -> None:
    """Raise on every worker unless all came with the same facts and none with an error.

    Args:
        job: all its workers must call this.
        facts: what must be the same everywhere; values that can be pickled and compared.
        where: what is being agreed on, for the message.
        error: what went wrong on this worker before it came here, if anything did.

    Raises:
        DisagreementError: facts differ, or another worker brought an error.
        Error: this worker's own `error`.
    """
    everyone: list[Any] = [facts]
    if job.world_size > 1:
        everyone = [None] * job.world_size
        dist.all_gather_object(everyone, {**facts, _ERROR: None if error is None else str(error)})
    if error is not None:
        raise error
    failed = [(worker, seen[_ERROR]) for worker, seen in enumerate(everyone) if seen.get(_ERROR)]
    if failed:
        raise DisagreementError(f"{where}: " + "; ".join(f"worker {w} failed: {text}" for w, text in failed))
    sentence = difference(everyone)
    if sentence:
        raise DisagreementError(f"{where}: {sentence}")


def difference(everyone: Sequence[Facts]) -> str | None:
    """Say which workers differ from the others in the first fact that differs.

    >>> difference([{"towers": 8}, {"towers": 7}, {"towers": 8}])
    'worker 1 has towers = 7, the others have 8'
    """
    for name in everyone[0]:
        values = [seen.get(name) for seen in everyone]
        if all(value == values[0] for value in values):
            continue
        if isinstance(values[0], (list, tuple)):
            return _difference_in_lists(name, values)
        return _tell(name, values)
    return None


def _difference_in_lists(name: str, values: Sequence[Any]) -> str:
    """Narrow the difference down to the first entry that differs."""
    for index in range(max(len(value) for value in values)):
        entries = [value[index] if index < len(value) else "nothing" for value in values]
        if any(entry != entries[0] for entry in entries):
            return _tell(f"{name}[{index}]", entries)
    raise AssertionError("lists that differ have an entry that differs")


def _tell(name: str, values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    usual, count = Counter(texts).most_common(1)[0]
    if count == 1 or 2 * count == len(texts):
        return ", ".join(f"worker {worker} has {name} = {text}" for worker, text in enumerate(texts))
    odd = [f"worker {worker} has {name} = {text}" for worker, text in enumerate(texts) if text != usual]
    return f"{', '.join(odd)}, the others have {usual}"
