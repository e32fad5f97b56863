"""Finds metrics that depend on which batches a worker measures, as the program's source code shows."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from samestep.errors import warn
from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_values import Place, Value
from samestep.watching.program.source_code import SourceCode
from samestep.watching.program.worker_values import NUM_WORKERS, RANK, WorkerValues

__all__ = ["check_measured"]

_BATCH = Place("the batch", "")
_OF_THE_FORM = {
    *("shape", "size", "ndim", "dim", "numel", "nelement", "dtype", "device", "layout", "len", "type"),
    *("new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like"),
}
"""Attributes and functions of a tensor that do not depend on its values."""
_LIKE_ANOTHER = {"expand_as", "reshape_as", "to", "type_as", "view_as"}
"""Methods that give a tensor the form of their argument."""


def check_measured(measure: Callable[..., Any], metrics: Callable[..., Any] | None, model: nn.Module) -> None:
    """Warn if what `measure(model, batch)` returns depends on earlier batches, or on the worker.

    Buffers and modes of the model are restored before each batch. What `metrics(totals)` returns must not
    depend on the worker, either.
    """
    restored = {
        Place(id(module), name) for module in model.modules() for name in ("training", *module._buffers)
    }
    flow = _Result(SourceCode(), measure, Value.of(model, "model"), Value(frozenset({_BATCH})))
    names = flow.names_of_kept(restored) | flow.names_of_workers()
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

    def names_of_kept(self, restored: set[Place]) -> set[str]:
        """Return the names of what it is computed from and the function changes, without some places.

        A cache that it fills once counts if what it is filled with depends on the batch.
        """
        places = self._sources - restored
        return self._values.names_of_changed(places) | self._values.names_of_computed(places, _BATCH)

    def names_of_workers(self) -> set[str]:
        """Return by what it differs between workers, or numbers of workers."""
        return {str(place.holder) for place in (NUM_WORKERS, RANK) if place in self._sources}

    def _attribute_value(self, holder: Value, name: str) -> Value:
        value = super()._attribute_value(holder, name)
        return _without_batch(value) if name in _OF_THE_FORM else value

    def visit_Call(self, node: ast.Call) -> Value:
        """Return what a call returns; not as computed from the batch if only from its form."""
        value = super().visit_Call(node)
        holder = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        given = (*node.args, *(each.value for each in node.keywords))
        match node.func:
            case ast.Name(name) | ast.Attribute(attr=name) if name in _OF_THE_FORM:
                is_of_form = len(self._of_batch(holder, *given)) < 2  # the others, such as a number, are not
            case ast.Attribute(attr=name) if name in _LIKE_ANOTHER:
                is_of_form = not self._of_batch(holder)
            case _:
                is_of_form = False
        return _without_batch(value) if is_of_form else value

    def _of_batch(self, *visited: ast.expr) -> list[ast.expr]:
        """Return those of these expressions that are computed from the batch."""
        return [each for each in visited if _BATCH in self._found.get(id(each), NOWHERE)]

    def _set_entry(self, holder: Value, index: ast.expr, value: Value) -> None:
        is_by_batch = _BATCH in self._data(index)  # each batch has its own
        super()._set_entry(holder, index, _without_batch(value) if is_by_batch else value)

    def _deciding_in(
        self, bodies: Sequence[Sequence[ast.stmt]], sources: frozenset[Place]
    ) -> frozenset[Place]:
        return super()._deciding_in(bodies, sources) - {_BATCH}  # such as whether it has an entry of its own


def _without_batch(value: Value) -> Value:
    return Value(value.sources - {_BATCH}) if _BATCH in value.sources else value
