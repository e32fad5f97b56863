"""Evaluation: totals over all examples, with the same bits on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from samestep.arguments import check_callable, whole
from samestep.batches.batch import GlobalBatch
from samestep.batches.copier import Copier
from samestep.buffers.kept_buffers import KeptBuffers
from samestep.data.readers import COMPARE_EVERY, COMPARED, BatchedReader, Reader, Request, is_batched
from samestep.errors import ConfigError, UsageError, shown
from samestep.streams import keep_globals, seed_globals, stream_seed
from samestep.watching.measured import check_measured
from samestep.watching.model.own_generators import OwnGenerators, is_generator
from samestep.watching.model.weight_hash import WeightHash
from samestep.watching.must_match import of_weights
from samestep.watching.program.reach import in_reach
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["Evaluation", "describe", "evaluation_mode", "line_of"]

Measure: TypeAlias = Callable[[nn.Module, Any], Mapping[str, tuple[Any, Any]]]
Totals: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
_Part: TypeAlias = dict[str, tuple[Tensor, Tensor]]

_seen: WeakSet[Evaluation] = WeakSet()
"""The evaluations of this process that have run."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Computes metrics over a dataset, with each example counted once on any number of workers.

    Batches of `rows` examples are distributed over the workers in turn. A batch has the same shape, and so
    gives the same bits, on any worker. Integer totals are added exactly, floating-point totals in float64 in
    the order of the batches. The model is in evaluation mode, without gradients. Random numbers come from
    streams that training does not use. Modes and buffers of the model are restored before each batch and at
    the end. State that `measure` keeps elsewhere covers only this worker's batches.

    Args:
        dataset: map-style (`len(dataset)` and `dataset[example]`), or a `BatchedDataset`.
        measure: `measure(model, batch)` -> {name: (sum, count)} for one batch: numbers, or tensors of any
            shape, which are added over batches.
        metrics: `metrics(totals)` -> {name: number} from the totals {name: (sum, count)}, with the main
            metric first; by default each sum divided by its count.
        rows: examples per batch; the last batch may have fewer.
        collate_fn: a list of examples -> a batch; torch's `default_collate` by default.

    Raises:
        ConfigError: the dataset is empty, or `rows` is below 1.

    Example:
        >>> def accuracy(model, batch):
        ...     inputs, labels = batch
        ...     return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}
        >>> examples = [(torch.tensor([1.0, 0.0]), 0), (torch.tensor([0.0, 1.0]), 0)]
        >>> Evaluation(examples, accuracy)(nn.Identity(), Job(torch.device("cpu")))
        {'accuracy': 0.5}
    """

    dataset: Any
    measure: Measure
    _: KW_ONLY
    metrics: Callable[[Totals], Mapping[str, float]] | None = None
    rows: int = 250
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__len__"):
            raise ConfigError(
                f"dataset is a {type(self.dataset).__name__} without a length: expected a map-style dataset, "
                "with __len__ and __getitem__"
            )
        check_callable("measure", self.measure, "a function measure(model, batch)")
        if self.metrics is not None:
            check_callable("metrics", self.metrics, "a function of the totals")
        whole("rows", self.rows, 1, "the examples in a batch of the evaluation")
        if not len(self.dataset):
            raise ConfigError(
                f"dataset ({type(self.dataset).__name__}) is empty: expected at least one example to evaluate"
            )

    def __call__(self, model: nn.Module, job: Job) -> dict[str, float]:
        """Return the metrics of a model, on every worker; all workers must call this.

        Raises:
            DisagreementError: another worker raised an error, or has different weights, data or `rows`.
            UsageError: `measure` or `metrics` returned a wrong type, or `measure` wrote to the weights.
        """
        totals = self.totals(model, job)
        return _means(totals) if self.metrics is None else _numbers(self.metrics(totals))

    def totals(self, model: nn.Module, job: Job) -> Totals:
        """Return the totals over all examples; if one worker raises an error, all do."""
        parts: dict[int, _Part] = {}
        must_match: dict[str, Any] = {}
        error = None
        try:
            if job.is_first and self not in _seen:
                _seen.add(self)
                check_measured(self.measure, self.metrics, model)
            generators = OwnGenerators(model)
            generators.start_step(in_reach(_is_generator, [("measure", self.measure)]))
            generators.note()
            with keep_globals(job.device), evaluation_mode(model), _Unchanged(model) as kept, torch.no_grad():
                parts = _merged(self._measured(model, job, kept))
                must_match = {**self._must_match, **of_weights(kept.hashes)}
            generators.compare()
            generators.check("an evaluation", "batch")
        except Exception as raised:
            error = raised
        gathered = agree(job, must_match, where="evaluation", error=error, message=parts)
        return _total({place: part for parts in gathered for place, part in parts.items()})

    @property
    def _reader(self) -> BatchedReader | Reader:
        dataset = self.dataset
        return BatchedReader(dataset, 0) if is_batched(dataset) else Reader(dataset, 0, self.collate_fn)

    @property
    def _must_match(self) -> dict[str, Any]:
        """Values that must be the same on all workers, because each reads different batches."""
        first = self._reader[Request(0, 0, {}, compared=0)][COMPARED].example
        return {"rows": self.rows, "examples": len(self.dataset), "checksum of example 0": first}

    def _measured(self, model: nn.Module, job: Job, kept: _Unchanged) -> Iterator[tuple[int, _Part]]:
        """Yield the number and the totals of each of this worker's batches."""
        dataset, reader = self.dataset, self._reader
        copier = Copier(job.device)
        for number in range(job.rank, -(-len(dataset) // self.rows), job.world_size):
            examples = np.arange(number * self.rows, min((number + 1) * self.rows, len(dataset)))
            compared = int(examples[0]) if number % COMPARE_EVERY == 0 else None
            read = reader[Request(0, number, {0: examples}, compared)][0]
            seed_globals(stream_seed(0, "evaluation", number), job.device)
            batch = GlobalBatch.open(read).take(range(len(examples)), copier)
            kept.start_batch()
            yield number, _checked(self.measure(model, batch))


def describe(metrics: Mapping[str, float]) -> str:
    """Format metrics as "name = value, ..."."""
    return ", ".join(f"{name} = {value:.4f}" for name, value in metrics.items())


def line_of(step: int, metrics: Mapping[str, float]) -> str:
    """Format the metrics after a step as a line with the current time."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}: step {step}: {describe(metrics)}"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block, and restore the mode of each layer at the end."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, was_training in modes:
            layer.training = was_training


class _Unchanged:
    """Starts each batch from the same modes and buffers, and restores the buffers at the end.

    Weights must not change, and must be the same on all workers, because each measures different batches.

    Attributes:
        hashes: the hashes of the weights, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._buffers = model, KeptBuffers(model)
        self._weights = WeightHash.of_parameters(model)
        self.hashes = self._weights.by_name()

    def start_batch(self) -> None:
        """Undo what `measure` did to modes and buffers: which batches came before depends on the worker."""
        self._model.eval()
        self._buffers.restore()

    def __enter__(self) -> _Unchanged:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._buffers.restore()
        now = {} if kind is not None else self._weights.by_name()
        written = [name for name in now if now[name] != self.hashes.get(name)]
        if written:
            raise UsageError(
                f"measure wrote to {', '.join(written[:4])}: each worker measures different batches, so the "
                "workers' models would diverge; write to a copy of the model, or between two evaluations"
            )


def _is_generator(value: Any) -> bool:
    return type(value) is torch.Generator or is_generator(value)


def _checked(measured: Any) -> _Part:
    is_right = isinstance(measured, Mapping) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in measured.values()
    )
    if not is_right:
        raise UsageError(f"measure returned {shown(measured)}: expected a dict from names to (sum, count)")
    return {str(n): (_total_of(n, total), _total_of(n, count)) for n, (total, count) in measured.items()}


def _total_of(name: object, value: Any) -> Tensor:
    try:
        total = torch.as_tensor(value, device="cpu").detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"measure: {name!r} holds {shown(value)}: expected numbers, or tensors") from error
    return total.double() if total.is_floating_point() else total.long()


def _merged(measured: Iterator[tuple[int, _Part]]) -> dict[int, _Part]:
    """Add integer totals, which are exact in any order; keep floating-point totals by batch number."""
    parts: dict[int, _Part] = {}
    exact: _Part = {}
    for number, part in measured:
        if any(total.is_floating_point() for pair in part.values() for total in pair):
            parts[number] = part
        else:
            exact = part if not exact else _added(exact, part)
    return {**({-1 - number: exact} if exact else {}), **parts}


def _total(parts: Mapping[int, _Part]) -> Totals:
    total: _Part = {}
    for place in sorted(parts):
        total = parts[place] if not total else _added(total, parts[place])
    return total


def _added(left: _Part, right: _Part) -> _Part:
    if left.keys() != right.keys():
        raise UsageError(f"measure returned {sorted(right)} after {sorted(left)}: expected the same names")
    return {name: (left[name][0] + right[name][0], left[name][1] + right[name][1]) for name in left}


def _means(totals: Totals) -> dict[str, float]:
    for name, (total, count) in totals.items():
        if total.numel() != 1 or count.numel() != 1:
            raise UsageError(f"measure: {name!r} is not a number: pass `metrics`, a function of the totals")
    return {
        name: float(total) / float(count) if count else math.nan for name, (total, count) in totals.items()
    }


def _numbers(found: Any) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"metrics returned {shown(found)}: expected a dict of numbers by name") from error
