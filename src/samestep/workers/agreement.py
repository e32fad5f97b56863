"""Workers agree before they exchange: who differs, and how, in one sentence on every worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from samestep.errors import DisagreementError, Error
from samestep.workers.job import Job

__all__ = ["agree", "difference"]

Facts = Mapping[str, Any]


def agree(
    job: Job, facts: Facts, *, where: str, error: Exception | None = None, news: Any = None
) -> list[Any]:
    """Raise on every worker unless all came with the same facts and none with an error.

    Args:
        job: all its workers must call this.
        facts: what must be the same everywhere; values that can be pickled and compared.
        where: what is being agreed on, for the message.
        error: what went wrong on this worker before it came here, if anything did.
        news: what this worker has to tell the others; it may differ from theirs.

    Returns:
        The news of all workers.

    Raises:
        DisagreementError: facts differ, or another worker brought an error.
        LostWorkerError: another worker is gone.
        Exception: this worker's own `error`.
    """
    everyone: list[Any] = [(facts, None, news)]
    if job.world_size > 1:
        everyone = [None] * job.world_size
        with job.together(where):
            dist.all_gather_object(everyone, (facts, None if error is None else _in_words(error), news))
    if error is not None:
        raise error
    failed = [(worker, text) for worker, (_, text, _) in enumerate(everyone) if text]
    if failed:
        raise DisagreementError(f"{where}: " + "; ".join(f"worker {w} failed: {text}" for w, text in failed))
    sentence = difference([seen for seen, _, _ in everyone])
    if sentence:
        raise DisagreementError(f"{where}: {sentence}")
    return [told for _, _, told in everyone]


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


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
