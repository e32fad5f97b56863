"""Visits the expressions of a program's code: what each is computed from."""

from __future__ import annotations

import ast
import dataclasses
from abc import ABC
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from types import FunctionType
from typing import TypeAlias

from torch import Tensor, nn

from samestep.watching.program.calls import NOWHERE, Calls
from samestep.watching.program.code_values import (
    UNKNOWN,
    LocalFunction,
    Method,
    NewObject,
    Place,
    Scope,
    Value,
    join,
    kind_of,
)
from samestep.watching.program.place_values import ENTRIES, numbered
from samestep.watching.program.source_code import Function
from samestep.watching.program.syntax import constant_number, is_whole, names_in, own_names

__all__ = ["Expressions"]

_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Expressions(Calls, ABC):
    """The expressions of a turn, on both sides of assignments."""

    def generic_visit(self, node: ast.AST) -> Value:
        """Visit all parts, of which the value is computed."""
        parts = [self._values.data_of(self.visit(each)) for each in ast.iter_child_nodes(node)]
        return Value(NOWHERE.union(*parts))

    def visit_Constant(self, node: ast.Constant) -> Value:
        """Return what is constant; a string as such, because it may name something."""
        return Value(NOWHERE, node.value) if isinstance(node.value, str) else Value()

    def visit_Name(self, node: ast.Name) -> Value:
        """Return a variable's value."""
        place = self._scope.place_of(node.id)
        known = self._values.get(place)
        return self._values.read(self._scope.value_before(node.id)) if known is None else known

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        """Return an attribute's value, or what a property returns."""
        holder = self.visit(node.value)
        is_same = node.attr == "data" and isinstance(holder.object, Tensor)
        return holder if is_same else self._attribute_value(holder, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        """Return the value of an entry."""
        return self._entry(self.visit(node.value), node.slice)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        """Set a variable."""
        value = self.visit(node.value)
        self._set(node.target, value)
        return value

    def visit_Lambda(self, node: Function) -> Value:
        """Return a function of the turn's own."""
        scope = Scope(own_names(node), path=self._scope.path, around=self._scope)
        return Value.of(self._values.keep(LocalFunction(node, scope)))

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        match called.object, arguments:
            case function, [old, *_] if function is dataclasses.replace:
                return self._replaced(old, named)
            case Method(function=FunctionType(__name__="_replace"), of=old), _:  # of a named tuple
                return self._replaced(old, named)
        return super()._call_object(called, arguments, named)

    def _replaced(self, old: Value, named: Mapping[str, Value]) -> Value:
        """Return an object that is like an old one, except for some attributes."""
        made = self._new(kind_of(old), self._values.all_in(old))
        self._hold(made, named)
        return made

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        """Return what an operator returns, which a class may define."""
        left, right = self.visit(node.left), self.visit(node.right)
        sources = self._values.data_of(left) | self._values.data_of(right)
        if (found := self._operate(node.op, left, right)) is not None:
            return found
        is_list = left.is_container and isinstance(node.op, (ast.Add, ast.Mult))  # such as [0.0] * size
        return self._new(None, sources) if is_list else Value(sources)

    def visit_Compare(self, node: ast.Compare) -> Value:
        """Return what comparisons return, which a class may define."""
        parts = [self.visit(each) for each in (node.left, *node.comparators)]
        sources = NOWHERE.union(*map(self._values.data_of, parts))
        for left, right, operator in zip(parts, parts[1:], node.ops, strict=False):
            found = self._operate(operator, left, right)
            sources |= NOWHERE if found is None else self._values.data_of(found)
        return Value(sources)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        """Return one of two values."""
        deciding = self._data(node.test)
        with self._values.decided_by(deciding):
            return join([self.visit(node.body), self.visit(node.orelse)]).computed_from(deciding)

    def visit_Tuple(self, node: ast.Tuple) -> Value:
        """Return the values in it."""
        parts = _Parts(map(self.visit, node.elts))
        return Value(NOWHERE.union(*map(self._values.data_of, parts)), parts)

    def visit_List(self, node: ast.List | ast.Set) -> Value:
        """Return a new container."""
        parts = [self.visit(each) for each in node.elts]
        return self._new(None, NOWHERE.union(*map(self._values.data_of, parts)), parts)

    visit_Set = visit_List

    def visit_Dict(self, node: ast.Dict) -> Value:
        """Return a new container; entries with constant names are told apart."""
        keys = [None if key is None else self.visit(key) for key in node.keys]
        names = [None if key is None else key.text for key in keys]
        named = self._visit_named(zip(names, node.values, strict=True))
        others = [named.pop("", Value()), *filter(None, keys)]
        made = self._new(None, NOWHERE.union(*map(self._values.data_of, others)))
        self._hold(made, named)
        return made

    def visit_ListComp(self, node: _Comprehension) -> Value:
        """Return a new container."""
        targets = [generator.target for generator in node.generators]
        scope = Scope(names_in(targets), path=self._scope.path, around=self._scope)
        return self._new(None, self._comprehend(node, node.generators, scope))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _comprehend(
        self, node: _Comprehension, generators: Sequence[ast.comprehension], scope: Scope
    ) -> frozenset[Place]:
        if not generators:
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return NOWHERE.union(*map(self._data, parts))
        found = NOWHERE
        elements = self._elements(generators[0].iter)
        outer, self._scope = self._scope, scope
        for each in elements:
            self._set(generators[0].target, each)
            found = found.union(*map(self._data, generators[0].ifs))
            found |= self._comprehend(node, generators[1:], scope)
        self._scope = outer
        return found

    def _elements(self, node: ast.expr) -> Sequence[Value]:
        """Return the values that a loop takes: the objects in a container, or what all are one of."""
        value = self.visit(node)
        match node:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of]):
                return _pairs(self._elements(of))
            case ast.Call(func=ast.Name(id="zip"), args=parts):
                taken = zip_longest(*map(self._elements, parts), fillvalue=Value())
                return [Value(value.sources, _Parts(each)) for each in taken]
            case ast.Call(func=ast.Attribute(value=of, attr="values")):
                return self._values.objects_in(self.visit(of)) or [value]
            case ast.Call(func=ast.Attribute(value=of, attr="items")):
                return _pairs(self._values.objects_in(self.visit(of)) or [value])
            case ast.Call(func=ast.Attribute(value=of, attr="parameters")):
                return [self._parameter_of(self.visit(of), value)]
            case ast.Call(func=ast.Attribute(value=of, attr="named_parameters")):
                return _pairs([self._parameter_of(self.visit(of), value)])
        return self._values.objects_in(value) or [Value(self._advance(value))]

    def _parameter_of(self, module: Value, value: Value) -> Value:
        """Return one of a module's parameters, for all of them; `value` if that is no module."""
        return self._new(nn.Parameter, value.sources) if issubclass(kind_of(module), nn.Module) else value

    def _entry(self, holder: Value, index: ast.expr) -> Value:
        given = self.visit(index)
        name, others = given.text, self._values.data_of(given)
        if (found := self._call_special(holder, "__getitem__", given)) is not None:
            return found
        number = constant_number(index)
        if number == -1 and (last := self._values.last(holder)) is not None:
            return last
        if (known := self._object_at(holder, index)) is not None:
            return known.computed_from(others)
        if number is not None and holder.key is not None:
            return self._values.read_entry(Place(holder.key, numbered(number)), holder)
        if holder.key is None or not name:
            return Value(self._values.data_of(holder) | others)
        place = Place(holder.key, name)
        entries = (self._values.get(Place(holder.key, ENTRIES)) or Value()).sources
        if (known := self._values.get(place)) is not None:
            return known.computed_from(entries, others)
        if isinstance(holder.object, NewObject):
            if holder.object.kind is not defaultdict:
                return Value(self._values.data_of(holder))
            self._values.put(place, self._new(None, NOWHERE), f"{name} of {holder.name}")
            return self._values.get(place) or Value()
        named = holder.object._modules if isinstance(holder.object, nn.ModuleDict) else holder.object
        held = named.get(name, UNKNOWN) if isinstance(named, dict) else UNKNOWN
        before = Value.before(place, f"{name} of {holder.name}", held)
        return self._values.read(before).computed_from(holder.sources, entries, others)

    def _object_at(self, holder: Value, index: ast.expr) -> Value | None:
        """Return the object in a container that is known; where the index is computed, always the first."""
        objects, number = self._values.objects_in(holder), constant_number(index)
        if number is not None and isinstance(holder.object, nn.Sequential | nn.ModuleList):
            objects = [Value.of(each, holder.name) for each in holder.object]
        if number is not None and not isinstance(holder.object, dict):
            return objects[number] if -len(objects) <= number < len(objects) else None
        is_computed = number is None and not self.visit(index).text and not isinstance(index, ast.Slice)
        return objects[0] if objects and is_computed else None

    def _set(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self._values.put(self._scope.place_of(name), value, name)
            case ast.Attribute(value=of, attr=name):
                self._set_attribute(self.visit(of), name, value)
            case ast.Subscript(value=of, slice=index):
                self._set_entry(self.visit(of), index, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                same = [Value(self._values.data_of(value))] * len(targets)
                parts = value.object if isinstance(value.object, _Parts) else same
                for each, part in zip(targets, parts, strict=False):
                    self._set(each, part)
            case ast.Starred(value=inner):
                self._set(inner, value)

    def _set_entry(self, holder: Value, index: ast.expr, value: Value) -> None:
        given = self.visit(index)
        if self._call_special(holder, "__setitem__", given, value) is not None:
            return
        if isinstance(holder.object, Tensor):
            self._write(holder, self._values.data_of(value), is_new=is_whole(index))
            return
        if is_whole(index):
            self._values.empty(holder)
        if given.text and holder.key is not None:
            place = Place(holder.key, given.text)
            self._values.put(place, value, f"{given.text} of {holder.name}")
            return
        number, sources = constant_number(index), self._values.data_of(value).union(self._values.deciding)
        is_own = any(place.holder == holder.key for place in sources)
        if number is None or is_own:  # what one entry is set to, others don't have
            self._values.fill(holder, sources if number is None else NOWHERE, is_change=is_own)
        if number is not None and holder.key is not None:
            self._values.put(Place(holder.key, numbered(number)), value, holder.name)


class _Parts(list[Value]):
    """The values in a tuple."""


def _pairs(values: Iterable[Value]) -> list[Value]:
    """Return pairs of a number, or a name, and a value."""
    return [Value(each.sources, _Parts([Value(), each])) for each in values]
