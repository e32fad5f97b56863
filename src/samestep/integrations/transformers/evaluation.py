"""Evaluation on all workers: batches of the same rows whatever their number, each computed by one of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from accelerate.utils import send_to_device

from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["Prediction", "Rounds"]


class Prediction(NamedTuple):
    """What a batch of an evaluation gave: its mean loss, what that is a mean over, logits and labels."""

    loss: Any
    counted: float
    logits: Any
    labels: Any


class Rounds:
    """A loader's batches, W at a time: each worker predicts one of them, and gets the others' predictions.

    All else that a loader has is that of `loader`.
    """

    def __init__(self, loader: Any, job: Job) -> None:
        self._loader = loader
        self._job = job
        self._batches: deque[Any] = deque()
        self._predictions: deque[Prediction] = deque()
        self._used: list[Prediction] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while group := list(islice(batches, self._job.world_size)):
            self._batches.extend(group)
            yield from group
            self._batches.clear()
            self._predictions.clear()

    def predict(self, batch: Any, predict: Callable[[Any], Prediction]) -> Prediction:
        """Return what `predict` gives for a batch: on whichever worker, if it is one of this loader's."""
        if not self._batches or self._batches[0] is not batch:
            self._used.append(predict(batch))
        else:
            if not self._predictions:
                self._predictions.extend(self._predict_round(predict))
            self._batches.popleft()
            self._used.append(self._predictions.popleft())
        return self._used[-1]

    def _predict_round(self, predict: Callable[[Any], Prediction]) -> list[Prediction]:
        rank, device = self._job.rank, self._job.device
        own = predict(self._batches[rank]) if rank < len(self._batches) else None
        if self._job.world_size == 1:
            return [] if own is None else [own]
        found = gather_objects(self._job.transport, send_to_device(own, "cpu"), "evaluation")
        return [Prediction(*send_to_device(tuple(each), device)) for each in found if each is not None]

    def loss(self) -> float | None:
        """Return the mean loss over all that the batches' losses count; None where there is nothing."""
        counted = [
            (float(each.loss), each.counted) for each in self._used if each.loss is not None and each.counted
        ]
        total = math.fsum(count for _, count in counted)
        return math.fsum(loss * count for loss, count in counted) / total if total else None
