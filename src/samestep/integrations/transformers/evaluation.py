"""Evaluation on all workers: each predicts some of the batches, which do not depend on their number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from accelerate.utils import send_to_device
from torch import nn

from samestep.batches.columns import Whole
from samestep.batches.fingerprint import fingerprint
from samestep.buffers.kept_buffers import KeptBuffers
from samestep.buffers.policies import Policy
from samestep.integrations.transformers.alike import weights_of
from samestep.streams import keep_globals, seed_globals, stream_seed
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["Prediction", "Rounds"]

_WHERE = "evaluation"
_DATA = (
    "expected the same data in the same order on all workers, each of which predicts different batches: seed "
    "shuffles and splits; torch's, Python's and NumPy's global generators are seeded for each batch"
)
_PLAIN = (bool, int, float, str, type(None))


class Prediction(NamedTuple):
    """The prediction for a batch: mean loss, the number of items in that mean, logits and labels."""

    loss: Any
    counted: float
    logits: Any
    labels: Any


class Rounds:
    """Iterates over a loader in rounds of W batches: each worker predicts one, and gets all W predictions.

    Batches and weights must be the same on all workers. Random numbers drawn while the n-th batch is read,
    such as a collator's masks, come from a stream of (seed, n), and those drawn while it is predicted, such
    as sampled text, from another stream. One common sequence would depend on the number of workers, because
    each worker predicts different batches.

    All other attributes are those of `loader`.
    """

    def __init__(
        self,
        loader: Any,
        model: nn.Module,
        job: Job,
        seed: int,
        policies: Mapping[str, Policy] | None = None,  # of the model's buffers
    ) -> None:
        self._loader = loader
        self._model = model
        self._job = job
        self._seed = seed
        self._policies = policies
        self._buffers: KeptBuffers | None = None  # their values before the first prediction
        self._num_read = 0
        self._batches: deque[Any] = deque()
        self._predictions: deque[Prediction] = deque()
        self._used: list[Prediction] = []
        self._is_over = False  # whether all workers have finished, or have raised together

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = self._seeded(iter(self._loader))
        while group := list(islice(batches, self._job.world_size)):
            self._batches.extend(group)
            yield from group
            self._batches.clear()
            self._predictions.clear()

    def _seeded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each read under its own random streams."""
        while True:
            with self._streams("evaluation batch", self._num_read):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._num_read += 1
            yield batch

    @contextmanager
    def _streams(self, purpose: str, number: int) -> Iterator[None]:
        with keep_globals(self._job.device):
            seed_globals(stream_seed(self._seed, purpose, number), self._job.device)
            yield

    def predict(self, batch: Any, predict: Callable[[Any], Prediction]) -> Prediction:
        """Return `predict(batch)`, computed on any one worker if the batch is the next one of this loader."""
        if not self._batches or self._batches[0] is not batch:
            self._used.append(predict(batch))
        else:
            if not self._predictions:
                self._predictions.extend(self._predict_round(predict))
            self._batches.popleft()
            self._used.append(self._predictions.popleft())
        return self._used[-1]

    def _predict_round(self, predict: Callable[[Any], Prediction]) -> list[Prediction]:
        rank, device, own, error = self._job.rank, self._job.device, None, None
        try:
            if rank < len(self._batches):
                with self._streams("evaluation", self._num_read - len(self._batches) + rank):
                    own = self._predict_alone(self._batches[rank], predict)
        except Exception as raised:
            error = raised
        if self._job.world_size == 1 and own is not None:
            return [own]
        found = self._agree(self._of_round(), error=error, message=send_to_device(own, "cpu"))
        return [Prediction(*send_to_device(tuple(each), device)) for each in found if each is not None]

    def _predict_alone(self, batch: Any, predict: Callable[[Any], Prediction]) -> Prediction:
        """Predict a batch from the buffers that there were at first, whichever batches came before."""
        if self._buffers is None:
            self._buffers = KeptBuffers(self._model)
        try:
            return predict(batch)
        finally:
            self._buffers.restore()

    def _of_round(self) -> dict[str, Any]:
        """Return the values that must be the same on all workers, because each predicts another batch."""
        first = self._num_read - len(self._batches)
        checksums = {f"batch {n}": fingerprint(Whole(batch)) for n, batch in enumerate(self._batches, first)}
        same = {
            "batches read": self._num_read,
            "checksum of": checksums,
            f"?checksum of: {_DATA}": checksums,
        }
        if first == 0:
            same |= weights_of(self._model, self._policies)
        return same

    def _agree(self, same: Mapping[str, Any], **own: Any) -> list[Any]:
        self._is_over = True  # if `agree` raises, it does on all workers
        found = agree(self._job, same, where=_WHERE, **own)
        self._is_over = False
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all workers if one raises in this block, such as in a collator or `compute_metrics`."""
        try:
            yield
        except Exception as error:
            if not self._is_over:
                self._agree({}, error=error)
            raise

    def end(self, metrics: dict[str, Any]) -> None:
        """Use worker 0's metrics on all workers, so that decisions based on them are the same everywhere.

        Workers have the same predictions, but metrics differ if they use random numbers, or if only one
        worker computes them.
        """
        plain = {name: value for name, value in metrics.items() if isinstance(value, _PLAIN)}
        metrics |= self._agree({"batches read": f"all {self._num_read}"}, message=plain)[0]
        self._is_over = True

    def loss(self) -> float | None:
        """Return the mean loss over all items, such as labels, of all batches; None if there are none."""
        counted = [
            (float(each.loss), each.counted) for each in self._used if each.loss is not None and each.counted
        ]
        total = math.fsum(count for _, count in counted)
        return math.fsum(loss * count for loss, count in counted) / total if total else None
