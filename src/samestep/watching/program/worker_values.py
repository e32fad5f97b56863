"""Follows what a program's code computes from the number of workers, and from a worker's rank."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import NewObject, Place, Value, is_of_samestep
from samestep.watching.program.source_code import LEAVING
from samestep.watching.program.syntax import has_number

__all__ = ["NUM_WORKERS", "RANK", "WorkerValues"]

NUM_WORKERS = Place("the number of workers", "")
RANK = Place("the worker's rank", "")

_BOTH = frozenset({NUM_WORKERS, RANK})
_COUNTED, _RANKED = Value(frozenset({NUM_WORKERS})), Value(frozenset({RANK}))
_VARIABLES: Mapping[Any, Value] = {
    "WORLD_SIZE": _COUNTED,
    "LOCAL_WORLD_SIZE": _COUNTED,
    "RANK": _RANKED,
    "LOCAL_RANK": _RANKED,
}
_FUNCTIONS: Mapping[Any, Value] = {dist.get_world_size: _COUNTED, dist.get_rank: _RANKED}


class WorkerValues(CodeFlow):
    """Values with `NUM_WORKERS` and `RANK` among their sources, if they are computed from these.

    These are attributes named `world_size`, a job's `rank`, torch's functions and its `DistributedSampler`,
    and the launchers' environment variables. Not what comparisons and branches decide, such as
    `if job.world_size > 1`, because both sides may compute the same; but other numbers are, such as
    `0.2 if job.world_size > 1 else 0.1`.
    """

    _of_configuration = _BOTH
    """What else a configuration may hold, of which its other contents do not depend."""

    def visit_Constant(self, node: ast.Constant) -> Value:
        """Return what an environment variable of this name has, as for `os.getenv`."""
        value = super().visit_Constant(node)
        return value.computed_from(_VARIABLES.get(node.value, value).sources)

    def visit_Call(self, node: ast.Call) -> Value:
        """Return what a call returns: if a library's, a new object, which may get attributes."""
        value = super().visit_Call(node)
        is_new = value.key is None and not value.is_known
        return self._new(None, value.sources)._replace(name=value.name) if is_new else value

    def visit_Compare(self, node: ast.Compare) -> Value:
        """Return what a comparison returns, as if it did not depend on workers."""
        value = super().visit_Compare(node)
        return value._replace(sources=value.sources - _BOTH)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        """Return one of two values; which number it is depends on what is compared."""
        value = super().visit_IfExp(node)
        is_number = has_number(node.body, node.orelse)
        return value.computed_from(self._counted_in(node.test)) if is_number else value

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Visit both branches; which number they set or return depends on what is compared."""
        super().visit_If(node)
        counted = self._counted_in(node.test)
        last = [body[-1] for body in (node.body, node.orelse) if body]
        returned = [each.value for each in last if isinstance(each, ast.Return) and each.value is not None]
        if counted and self._returned and len(returned) == 2 and any(map(has_number, returned)):
            self._returned[-1].append(Value(counted))
        if not counted or any(isinstance(each, LEAVING) for each in last):
            return  # the other branch has what follows, and does not choose what it sets
        for each in (*node.body, *node.orelse):
            if isinstance(each, (ast.Assign, ast.AugAssign)) and has_number(each.value):
                for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                    self._set(target, self.visit(target).computed_from(counted))

    def _counted_in(self, test: ast.expr) -> frozenset[Place]:
        """Return `NUM_WORKERS`, if a comparison has it."""
        compared = (each for each in ast.walk(test) if isinstance(each, ast.Compare))
        return NOWHERE.union(*(self.generic_visit(each).sources for each in compared)) & {NUM_WORKERS}

    def _entry(self, holder: Value, index: ast.expr) -> Value:
        return _VARIABLES.get(self.visit(index).text) or super()._entry(holder, index)

    def _attribute_value(self, holder: Value, name: str) -> Value:
        if name == "world_size":
            return _COUNTED
        if name == "rank" and is_of_samestep(type(holder.object)):
            return _RANKED  # a low-rank layer has a rank, too
        value = super()._attribute_value(holder, name)
        is_set = holder.key is not None and self._values.get(Place(holder.key, name)) is not None
        if is_set or not _may_hold_others(holder):
            return value
        return value._replace(sources=value.sources - self._of_configuration)

    def _new(self, kind: type | None, sources: frozenset[Place], parts: Sequence[Value] = ()) -> Value:
        """Return a new object, whose attributes are followed one by one."""
        return super()._new(kind, sources if kind is None else sources - self._of_configuration, parts)

    def _data_of_call(self, given: Iterable[Value]) -> frozenset[Place]:
        """Return what a library's function computes of these values, not of all that they hold."""
        given = list(given)
        held = self._of_configuration.difference(*(each.sources for each in given))
        return super()._data_of_call(given) - held

    def _advance(self, value: Value) -> frozenset[Place]:
        """Return what elements are computed from; not what a dict holds by names."""
        found = super()._advance(value)
        return found - (self._of_configuration - value.sources) if _may_hold_others(value) else found

    def _all_in(self, value: Value) -> frozenset[Place]:
        """Return what a value is computed from, with all that it holds, or returns when it is called."""
        return self._values.data_of(value) | super()._data_of_call([value])

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        known = _FUNCTIONS.get(called.object) if isinstance(called.object, FunctionType) else None
        returned = known or super()._call_object(called, arguments, named)
        if called.object is DistributedSampler and len(arguments) < 2 and "num_replicas" not in named:
            return (returned or Value())._replace(sources=_BOTH)  # it asks torch
        return returned

    def _deciding_in(
        self, bodies: Sequence[Sequence[ast.stmt]], sources: frozenset[Place]
    ) -> frozenset[Place]:
        return super()._deciding_in(bodies, sources) - _BOTH


def _may_hold_others(value: Value) -> bool:
    """Say whether this may be a configuration that a library has made, which holds other values, too."""
    return not value.is_known or (value.is_dict and isinstance(value.object, NewObject))
