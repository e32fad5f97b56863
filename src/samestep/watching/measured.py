"""Finds metrics that depend on which batches a worker measures, as the program's source code shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from samestep.errors import warn
from samestep.watching.program.code_values import Place, Value
from samestep.watching.program.source_code import SourceCode
from samestep.watching.program.worker_values import NUM_WORKERS, RANK, WorkerValues

__all__ = ["check_measured"]


def check_measured(measure: Callable[..., Any], metrics: Callable[..., Any] | None, model: nn.Module) -> None:
    """Warn if what `measure(model, batch)` returns depends on earlier batches, or on the worker.

    Buffers and modes of the model are restored before each batch. What `metrics(totals)` returns must not
    depend on the worker, either.
    """
    restored = {
        Place(id(module), name) for module in model.modules() for name in ("training", *module._buffers)
    }
    flow = _Result(SourceCode(), measure, Value.of(model, "model"), Value())
    names = flow.names_of_changed(restored) | flow.names_of_workers()
    if metrics is not None:
        names |= _Result(SourceCode(), metrics, Value()).names_of_workers()
    if names:
        warn(
            f"evaluation: metrics depend on {', '.join(sorted(names))}. Each worker measures other batches, "
            "and which ones depends on the number of workers: compute what measure returns from its batch "
            "alone"
        )


class _Result(WorkerValues):
    """What a function of the program returns."""

    def __init__(self, source: SourceCode, function: Callable[..., Any], *arguments: Value) -> None:
        super().__init__(source)
        returned = self._call_object(Value.of(function), arguments, {}) or Value()
        self._sources = self._values.data_of(returned)

    def names_of_changed(self, restored: set[Place]) -> set[str]:
        """Return the names of what it is computed from and the function changes, without some places."""
        return self._values.names_of_changed(self._sources - restored)

    def names_of_workers(self) -> set[str]:
        """Return by what it differs between workers, or numbers of workers."""
        return {str(place.holder) for place in (NUM_WORKERS, RANK) if place in self._sources}
