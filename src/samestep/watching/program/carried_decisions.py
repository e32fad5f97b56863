"""Finds what a turn decides by numbers that it carries on, such as `if count > 1000` after `count += 1`."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import MethodCall, Place, Value, kind_of
from samestep.watching.program.effects import is_setting
from samestep.watching.program.place_values import ENTRIES
from samestep.watching.program.program_line import ProgramLine
from samestep.watching.program.source_code import SourceCode
from samestep.watching.program.syntax import is_backward

__all__ = ["CarriedDecisions"]

_ADDED = {"append": 1, "appendleft": 1, "pop": -1, "popleft": -1}
"""How many entries methods add to a container."""

_NUMBERS = (int, float, complex, np.number)

_ROUNDING = {"ceil", "clamp", "clip", "floor", "int", "max", "min", "round", "trunc"}
"""Names of functions that return the same for many numbers, as comparisons do."""


class CarriedDecisions(CodeFlow):
    """The values of a turn, and where it decides by them.

    While nothing else is decided, losses have the same values as without it, so that only code shows it.

    Args:
        source: where functions are found.
    """

    def __init__(self, source: SourceCode) -> None:
        super().__init__(source)
        self._decisions: dict[ProgramLine, frozenset[Place]] = {}
        self._sums: dict[Place, float] = {}  # what is added to numbers and lengths, if known
        self._chosen_by: dict[int, ast.expr] = {}  # what decides whether branches run, by their ids
        self._tests = set[int]()  # the ids of all nodes of tests

    def by_line(self) -> Mapping[ProgramLine, set[str]]:
        """Return the names of what the turn carries on, and decides by on its losses, by lines."""
        found = {}
        for line, sources in self._decisions.items():
            places = (each for each in sources & self._losses if self._may_be_carried(each))
            found[line] = self._values.names_of_changed(frozenset(places))
        return {line: names for line, names in found.items() if names}

    def values(self) -> Mapping[str, object]:
        """Return what the turn may carry on and compares, by name; what is no number is never equal."""
        found: dict[str, object] = {}
        for place in filter(self._may_be_carried, NOWHERE.union(*self._decisions.values()) & self._losses):
            value = self._values.object_before(place)
            now = repr(value) if isinstance(value, _NUMBERS) else object()
            found |= dict.fromkeys(self._values.names_of_changed(frozenset({place})), now)
        return found

    def _may_be_carried(self, place: Place) -> bool:
        """Say whether a place is no tensor of several elements, which may be a cache, and not put back."""
        found = self._values.object_before(place)
        is_tensor = isinstance(found, Tensor) and found.numel() != 1
        return not is_tensor and self._sums.get(place) != 0

    def _decide(self, node: ast.expr, sources: frozenset[Place]) -> None:
        line = ProgramLine(self._scope.path, node.lineno)
        self._decisions[line] = self._decisions.get(line, NOWHERE) | sources

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Visit both branches."""
        self._chosen_by[id(node.body)] = node.test
        self._tests.update(map(id, ast.walk(node.test)))
        super().visit_If(node)

    visit_While = visit_If

    def visit_Match(self, node: ast.Match) -> None:
        """Visit all cases."""
        self._chosen_by |= {id(case.body): node.subject for case in node.cases}
        super().visit_Match(node)

    def _deciding_in(
        self, bodies: Sequence[Sequence[ast.stmt]], sources: frozenset[Place]
    ) -> frozenset[Place]:
        """Note what decides which branch runs; not what the branches set, as where something begins."""
        test = next((self._chosen_by[id(each)] for each in bodies if id(each) in self._chosen_by), None)
        if test is not None and not _asks_for_object(test):
            self._decide(test, sources)
        return super()._deciding_in(bodies, sources)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        """Note what decides which value it is."""
        value = super().visit_IfExp(node)
        if not isinstance(node.test, ast.Compare):
            self._decide(node.test, self._found.get(id(node.test), NOWHERE))
        return value

    def visit_Compare(self, node: ast.Compare) -> Value:
        """Note what is compared for something else than a branch."""
        value = super().visit_Compare(node)
        if not (id(node) in self._tests or _asks_for_object(node)):
            self._decide(node, value.sources)
        return value

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        """Note what is divided, if the result is rounded."""
        value = super().visit_BinOp(node)
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            self._decide(node, value.sources)
        return value

    def visit_Call(self, node: ast.Call) -> Value:
        """Note what is rounded, and what decides whether towers get losses."""
        value = super().visit_Call(node)
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _ROUNDING:
                self._decide(node, value.sources)
        if is_backward(node.func):
            self._losses |= self._values.deciding
        return value

    def _data_of_call(self, given: Iterable[Value]) -> frozenset[Place]:
        """Return what a library's function computes from its arguments; it may call modules, too."""
        given = list(given)
        modules = (each for each in given if isinstance(each.object, nn.Module))
        returned = [self._call_object(each, [], {}) or Value() for each in modules]
        return super()._data_of_call(given).union(*map(self._values.data_of, returned))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Note what is added to a number, or subtracted again."""
        super().visit_AugAssign(node)
        match node:
            case ast.AugAssign(op=ast.Add(), value=ast.Constant(value=int() | float() as number)):
                added: float = number
            case ast.AugAssign(op=ast.Sub(), value=ast.Constant(value=int() | float() as number)):
                added = -number
            case _:
                return
        for place in self._places_set_in([node]):
            self._add(place, added)

    def _change(self, call: MethodCall) -> None:
        """Note what is added to a container, or taken from it."""
        super()._change(call)
        self._add(Place(call.holder.key, ENTRIES), _ADDED.get(call.method, math.nan))

    def _add(self, place: Place, number: float) -> None:
        self._sums[place] = self._sums.get(place, 0) + (math.nan if self._num_branches else number)

    def _set_attribute(self, holder: Value, name: str, value: Value) -> None:
        """Set an attribute; on settings of layers, losses depend."""
        super()._set_attribute(holder, name, value)
        if is_setting(kind_of(holder), name):
            self._losses |= self._values.deciding | self._values.data_of(value)


def _asks_for_object(test: ast.expr) -> bool:
    """Say whether a comparison is with an object, such as None: whether something has a value yet."""
    return isinstance(test, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops)
