"""Follows values through a program's source code: what each is computed from, of what a turn begins with.

A turn is one run of the body of the loop over towers. This visits its statements in order, and those of the
program's functions that it calls. Of two branches, both may have run. Iterators from before the turn change
when elements are taken from them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import BuiltinFunctionType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import nn

from samestep.watching.program.code_values import (
    MISSING,
    UNKNOWN,
    LocalFunction,
    Method,
    NewObject,
    Parent,
    Place,
    Scope,
    Value,
    attribute_of,
    join,
)
from samestep.watching.program.place_values import ENTRIES, PlaceValues
from samestep.watching.program.program_line import frames_of_program
from samestep.watching.program.reach import locals_of
from samestep.watching.program.source_code import Computed, Function, SourceCode
from samestep.watching.program.syntax import (
    OPERATORS,
    asks_for_value,
    constant_name,
    constant_number,
    is_whole,
    loaded,
    own_names,
    parallel_names,
)

__all__ = ["CodeFlow"]

_CHANGING = {"add", "append", "appendleft", "extend", "insert", "update"}
_TAKING = {"pop", "popitem", "popleft", "send"}
_EMPTYING = {"clear", "fill", "fill_", "zero_"}
_SPECIAL: Mapping[object, str] = {
    float: "__float__",
    int: "__int__",
    bool: "__bool__",
    abs: "__abs__",
    len: "__len__",
    next: "__next__",
}
_CALLED = (FunctionType, MethodType, Method, LocalFunction, partial)
_MOST_CALLS = 8  # one within the other
_MOST_NODES = 10_000
_NOWHERE = frozenset[Place]()

_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class CodeFlow(ast.NodeVisitor):
    """The values of a turn.

    Args:
        source: where functions are found.
    """

    def __init__(self, source: SourceCode) -> None:
        self._source = source
        self._scope = Scope()
        self._values = PlaceValues()
        self._found: dict[int, frozenset[Place]] = {}  # by nodes of expressions that were visited
        self._running: list[object] = []
        self._selves: list[Value] = []  # the first arguments of functions that are running
        self._returned: list[list[Value]] = []
        self._num_nodes = 0
        self._has_loop = False

    @classmethod
    def of_running_loop(cls, source: SourceCode) -> CodeFlow:
        """Return the values of the loop that takes its next tower, and of generators before it."""
        flow = cls(source)
        for frame in frames_of_program():
            if (loop := source.loop_in(frame)) is not None:
                flow.run_loop(loop, Scope.of_frame(frame, dict(locals_of(frame))))
                if not any(isinstance(node, ast.Yield) for node in ast.walk(loop)):
                    break  # what is around it runs once a step
        return flow

    def run_loop(self, loop: ast.For, scope: Scope) -> None:
        """Visit the body of a loop."""
        self._scope, self._has_loop = scope, True
        self._set(loop.target, Value())
        names = parallel_names(loop)
        beside = [name for name in names if not _is_tower(scope.objects.get(name))]
        for name in beside if len(beside) < len(names) else ():  # one of them is the tower
            place = scope.place_of(name)
            self._values.put(place, Value(frozenset({place})), name)
            self._note(loop, frozenset({place}))
            self._note(loop.iter, frozenset({place}))
        self._run(loop.body)

    def run_function(self, function: Callable[..., Any], arguments: Sequence[Value]) -> None:
        """Visit a function; arguments that are missing depend on nothing."""
        self._call_function(function, arguments, {})

    def sets_anew(self, found: object, name: str) -> bool:
        """Say whether an object's attribute is set, and no expression depends on what it was before.

        False if no loop was visited.
        """
        place = Place(id(found), name)
        is_read = any(place in sources for sources in self._found.values())
        return self._has_loop and self._values.is_changed(place) and not is_read

    def carried_in(self, nodes: Iterable[Computed]) -> set[str] | None:
        """Return the names of what expressions are computed from, and the turn sets; None if not visited."""
        found = [self._found[id(node)] for node in nodes if id(node) in self._found]
        return self._values.names_of_changed(_NOWHERE.union(*found)) if found else None

    # ---- statements ----------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> Value:
        """Visit a statement or expression; return the value of an expression."""
        self._num_nodes += 1
        value = super().visit(node) if self._num_nodes < _MOST_NODES else None
        value = value or Value()
        if isinstance(node, ast.expr):
            self._note(node, self._values.data_of(value))
        return value

    def _run(self, body: Iterable[ast.AST]) -> None:
        for each in body:
            self.visit(each)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Set what is on the left."""
        value = self.visit(node.value)
        for target in node.targets:
            self._set(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Set a variable, if there is a value."""
        if node.value is not None:
            self._set(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Set what is on the left, or change the container that it is."""
        old, other = self.visit(loaded(node.target)), self.visit(node.value)
        sources = old.sources | self._values.data_of(old) | self._values.data_of(other)
        self._note(node, sources)
        in_place = f"__i{OPERATORS.get(type(node.op))}__"
        new = self._call_special(old, in_place, other) or self._operate(node.op, old, other)
        if new is not None:
            if new.key is None or new.key != old.key:
                self._set(node.target, new)
        elif old.is_known and old.is_container:
            self._values.fill(old, sources, is_change=True)
        else:
            self._set(node.target, Value(sources))

    def visit_Return(self, node: ast.Return) -> None:
        """Note what the function returns."""
        value = Value() if node.value is None else self.visit(node.value)
        if self._returned:
            self._returned[-1].append(value.computed_from(self._values.deciding))

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Visit both branches. What they set does not decide, such as a cache that one of them fills."""
        deciding = self._data(node.test)
        places = frozenset(self._places_set_in([*node.body, *node.orelse]))
        asked = (each for each in places if not {each, Place(each.holder, ENTRIES)}.isdisjoint(deciding))
        filled = places if asks_for_value(node.test) and any(asked) else _NOWHERE
        self._branch([node.body, node.orelse], deciding - places, filled)

    visit_While = visit_If  # its body may not run

    def visit_For(self, node: ast.For) -> None:
        """Visit the body for each known object, or once."""
        for each in self._elements(node.iter):
            self._note(node, each.sources)
            self._set(node.target, each)
            self._run(node.body)
        self._run(node.orelse)

    def visit_With(self, node: ast.With) -> None:
        """Visit what it runs before and after its body."""
        entered = [self.visit(item.context_expr) for item in node.items]
        for item, value in zip(node.items, entered, strict=True):
            bound = self._call_special(value, "__enter__") or value
            if item.optional_vars is not None:
                self._set(item.optional_vars, bound)
        self._run(node.body)
        for value in entered:
            self._call_special(value, "__exit__")

    def visit_Delete(self, node: ast.Delete) -> None:
        """Empty containers."""
        for target in node.targets:
            if isinstance(target, ast.Subscript) and is_whole(target.slice):
                self._values.empty(self.visit(target.value))

    def visit_Try(self, node: ast.Try) -> None:
        """Visit handlers as branches."""
        self._run([*node.body, *node.orelse])
        self._branch([[], *(each.body for each in node.handlers)])
        self._run(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        """Visit all cases as branches."""
        self._branch([[], *(each.body for each in node.cases)], self._data(node.subject))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Set a variable to the function, which runs when it is called."""
        self._values.put(self._scope.place_of(node.name), self.visit_Lambda(node), node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Leave out what is in a class."""

    def _branch(
        self,
        bodies: Iterable[Sequence[ast.stmt]],
        deciding: frozenset[Place] = _NOWHERE,
        filled: frozenset[Place] = _NOWHERE,
    ) -> None:
        self._values.branch([partial(self._run, body) for body in bodies], deciding, filled)

    def _places_set_in(self, body: Sequence[ast.stmt]) -> Iterator[Place]:
        """Yield the variables, attributes and containers that statements set."""
        for node in (node for statement in body for node in ast.walk(statement)):
            match node:
                case ast.Name(id=name, ctx=ast.Store()):
                    yield self._scope.place_of(name)
                case ast.Attribute(value=of, attr=name, ctx=ast.Store()):
                    yield Place(self.visit(of).key, name)
                case ast.Subscript(value=of, slice=index, ctx=ast.Store()):
                    yield Place(self.visit(of).key, ENTRIES)
                    yield Place(self.visit(of).key, constant_name(index))

    # ---- places --------------------------------------------------------------------------------------

    def _set(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self._values.put(self._scope.place_of(name), value, name)
            case ast.Attribute(value=of, attr=name):
                self._set_attribute(self.visit(of), name, value)
            case ast.Subscript(value=of, slice=index):
                holder, name = self.visit(of), constant_name(index)
                if self._call_special(holder, "__setitem__", self.visit(index), value) is not None:
                    return
                if is_whole(index):
                    self._values.empty(holder)
                if name and holder.key is not None:
                    self._values.put(Place(holder.key, name), value, f"{name} of {holder.name}")
                else:
                    sources = self._values.data_of(value).union(self._values.deciding)
                    is_own = any(place.holder == holder.key for place in sources)
                    self._values.fill(holder, sources, is_change=is_own)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                same = [Value(self._values.data_of(value))] * len(targets)
                parts = value.object if isinstance(value.object, _Parts) else same
                for each, part in zip(targets, parts, strict=False):
                    self._set(each, part)
            case ast.Starred(value=inner):
                self._set(inner, value)

    def _set_attribute(self, holder: Value, name: str, value: Value) -> None:
        if isinstance(found := _attribute(holder, name), property):
            self._call_function(found.fset, [holder, value], {})
        elif holder.key is not None:
            self._values.put(Place(holder.key, name), value, f"{name} of {holder.name}")

    def _attribute_value(self, holder: Value, name: str) -> Value:
        if holder.key is None:
            return Value(self._values.data_of(holder))
        place = Place(holder.key, name)
        if (known := self._values.get(place)) is not None:
            return known
        if self._values.is_filled(holder) and not holder.is_container:
            return Value(self._values.data_of(holder))  # a library has changed it
        match _attribute(holder, name):
            case property(fget=function):
                return self._call_function(function, [holder], {}) or Value(holder.sources)
            case FunctionType() as function if not _is_own(holder.object, name):
                return self._bound(function, holder)
            case classmethod(__func__=FunctionType() as function):
                kind = holder.object if isinstance(holder.object, type) else type(holder.object)
                return self._bound(function, Value.of(kind, holder.name))
            case staticmethod(__func__=function):
                return Value.of(function, name)
            case found if found is MISSING or isinstance(holder.object, NewObject):
                return Value(holder.sources)
            case found:
                return self._values.read(Value.before(place, f"{name} of {holder.name}", found))

    def _bound(self, function: FunctionType, holder: Value) -> Value:
        """Return a method of an object."""
        of = holder.object.of if isinstance(holder.object, Parent) else holder
        return Value.of(self._values.keep(Method(function, of)), of.name)

    def _new(self, kind: type | None, sources: frozenset[Place]) -> Value:
        made = self._values.keep(NewObject(kind))
        return Value(sources, made, made)

    # ---- expressions ---------------------------------------------------------------------------------

    def _data(self, node: ast.expr) -> frozenset[Place]:
        return self._values.data_of(self.visit(node))

    def _note(self, node: Computed, sources: frozenset[Place]) -> None:
        self._found[id(node)] = self._found.get(id(node), _NOWHERE).union(sources, self._values.deciding)

    def generic_visit(self, node: ast.AST) -> Value:
        """Visit all parts, of which the value is computed."""
        parts = [self._values.data_of(self.visit(each)) for each in ast.iter_child_nodes(node)]
        return Value(_NOWHERE.union(*parts))

    def visit_Name(self, node: ast.Name) -> Value:
        """Return a variable's value."""
        place = self._scope.place_of(node.id)
        known = self._values.get(place)
        return self._values.read(self._scope.value_before(node.id)) if known is None else known

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        """Return an attribute's value, or what a property returns."""
        return self._attribute_value(self.visit(node.value), node.attr)

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
        scope = Scope(own_names(node), around=self._scope)
        return Value.of(self._values.keep(LocalFunction(node, scope)))

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        """Return what an operator returns, which a class may define."""
        left, right = self.visit(node.left), self.visit(node.right)
        sources = self._values.data_of(left) | self._values.data_of(right)
        return self._operate(node.op, left, right) or Value(sources)

    def visit_Compare(self, node: ast.Compare) -> Value:
        """Return what comparisons return, which a class may define."""
        parts = [self.visit(each) for each in (node.left, *node.comparators)]
        sources = _NOWHERE.union(*map(self._values.data_of, parts))
        for left, right, operator in zip(parts, parts[1:], node.ops, strict=False):
            found = self._operate(operator, left, right)
            sources |= _NOWHERE if found is None else self._values.data_of(found)
        return Value(sources)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        """Return one of two values."""
        deciding = self._data(node.test)
        with self._values.decided_by(deciding):
            return join([self.visit(node.body), self.visit(node.orelse)]).computed_from(deciding)

    def visit_Tuple(self, node: ast.Tuple) -> Value:
        """Return the values in it."""
        parts = _Parts(map(self.visit, node.elts))
        return Value(_NOWHERE.union(*map(self._values.data_of, parts)), parts)

    def visit_List(self, node: ast.AST) -> Value:
        """Return a new container."""
        return self._new(None, self.generic_visit(node).sources)

    visit_Set = visit_Dict = visit_List

    def visit_ListComp(self, node: _Comprehension) -> Value:
        """Return a new container."""
        return self._new(None, self._comprehend(node, node.generators))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def _comprehend(self, node: _Comprehension, generators: Sequence[ast.comprehension]) -> frozenset[Place]:
        if not generators:
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return _NOWHERE.union(*map(self._data, parts))
        found = _NOWHERE
        for each in self._elements(generators[0].iter):
            self._set(generators[0].target, each)
            found = found.union(*map(self._data, generators[0].ifs), self._comprehend(node, generators[1:]))
        return found

    def _elements(self, node: ast.expr) -> Sequence[Value]:
        """Return the values that a loop takes: the objects in a container, or what all are one of."""
        value = self.visit(node)
        match node:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of]):
                return [Value(each.sources, _Parts([Value(), each])) for each in self._elements(of)]
            case ast.Call(func=ast.Name(id="zip"), args=parts):
                taken = zip_longest(*map(self._elements, parts), fillvalue=Value())
                return [Value(value.sources, _Parts(each)) for each in taken]
            case ast.Call(func=ast.Attribute(value=of, attr="values")):
                return self._values.objects_in(self.visit(of)) or [value]
            case ast.Call(func=ast.Attribute(value=of, attr="items")):
                found = self._values.objects_in(self.visit(of)) or [value]
                return [Value(each.sources, _Parts([Value(), each])) for each in found]
        return self._values.objects_in(value) or [Value(self._advance(value))]

    def _entry(self, holder: Value, index: ast.expr) -> Value:
        given, name = self.visit(index), constant_name(index)
        others = self._values.data_of(given)
        if (found := self._call_special(holder, "__getitem__", given)) is not None:
            return found
        if constant_number(index) == -1 and (last := self._values.last(holder)) is not None:
            return last
        if (known := self._object_at(holder, index)) is not None:
            return known.computed_from(others)
        if holder.key is None or not name:
            return Value(self._values.data_of(holder) | others)
        place = Place(holder.key, name)
        entries = (self._values.get(Place(holder.key, ENTRIES)) or Value()).sources
        if (known := self._values.get(place)) is not None:
            return known.computed_from(entries)
        if isinstance(holder.object, NewObject):
            return Value(self._values.data_of(holder))
        held = holder.object.get(name, UNKNOWN) if isinstance(holder.object, dict) else UNKNOWN
        before = Value.before(place, f"{name} of {holder.name}", held)
        return self._values.read(before).computed_from(entries)

    def _object_at(self, holder: Value, index: ast.expr) -> Value | None:
        """Return the object in a container that is known; where the index is computed, always the first."""
        objects, number = self._values.objects_in(holder), constant_number(index)
        if number is not None and not isinstance(holder.object, dict):
            return objects[number] if -len(objects) <= number < len(objects) else None
        is_computed = number is None and not constant_name(index) and not isinstance(index, ast.Slice)
        return objects[0] if objects and is_computed else None

    # ---- calls ---------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Value:
        """Visit what the call runs; return what that returns."""
        if isinstance(node.func, ast.Attribute):
            holder, method = self.visit(node.func.value), node.func.attr
            called = self._attribute_value(holder, method)
        else:
            holder, method, called = Value(), "", self.visit(node.func)
        arguments = [self.visit(each.value if isinstance(each, ast.Starred) else each) for each in node.args]
        named = {each.arg or "": self.visit(each.value) for each in node.keywords}
        if called.object is super and not arguments:
            return self._parent()
        match called.object, arguments, node.args:
            case builtins.getattr, [of, _, *default], [_, ast.Constant(str(name)), *_]:
                return self._attribute_value(of, name).computed_from(*map(self._values.data_of, default))
            case builtins.setattr, [of, _, new], [_, ast.Constant(str(name)), _]:
                self._set_attribute(of, name, new)
                return Value()
        returned = self._call_object(called, arguments, named)
        if returned is not None:
            return returned
        sources = called.sources | self._data_of_call([*arguments, *named.values()])
        if method in _EMPTYING:
            self._values.empty(holder)
        if method in _CHANGING:
            self._values.fill(holder, sources, is_change=True)
        if method in _TAKING:
            self._values.fill(holder, _NOWHERE, is_change=True)
            self._advance(holder)
        if method == "append" and len(arguments) == 1:
            self._values.set_last(holder, arguments[0])
        return Value(sources | self._values.data_of(holder))

    def _data_of_call(self, given: Iterable[Value]) -> frozenset[Place]:
        """Return what a library's function computes from its arguments; it may call these, or iterate."""
        sources = _NOWHERE
        for each in given:
            returned = self._call_object(each, [], {}) if isinstance(each.object, _CALLED) else None
            sources |= self._advance(each) | self._values.data_of(returned or Value())
        return sources

    def _advance(self, value: Value) -> frozenset[Place]:
        """Note that elements of an iterator are taken, if it is one; return what these are computed from."""
        if hasattr(type(value.object), "__next__"):
            self._values.fill(value, _NOWHERE, is_change=True)
        if isinstance(value.object, GeneratorType) and value.object.gi_frame is not None:
            self._resume(value.object, value.object.gi_frame, self._values.data_of(value))
        return self._values.data_of(value)

    def _resume(self, generator: object, frame: FrameType, deciding: frozenset[Place]) -> None:
        """Visit the body of a generator, where all depends on how often it has been resumed."""
        node = self._source.function(frame.f_code)
        if node is not None:
            with self._values.decided_by(deciding):
                self._inline(generator, node, Scope.of_frame(frame, dict(frame.f_locals)), [], {})

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        """Visit what a call runs; None if that is not code of the program."""
        match called.object:
            case FunctionType() as function:
                return self._call_function(function, arguments, named)
            case Method(function=function, of=holder):
                return self._call_function(function, [holder, *arguments], named)
            case MethodType() as method:
                return self._call_function(
                    method.__func__, [Value.of(method.__self__, called.name), *arguments], named
                )
            case LocalFunction(node=node, scope=scope) as function:
                return self._inline(function, node, scope, arguments, named)
            case partial() as function:
                given = [*map(Value.of, function.args), *arguments]
                fixed = {name: Value.of(value, name) for name, value in function.keywords.items()}
                return self._call_object(Value.of(function.func), given, {**fixed, **named})
            case (type() | BuiltinFunctionType()) as builtin if builtin in _SPECIAL and arguments:
                return self._call_special(arguments[0], _SPECIAL[builtin])
            case type() as kind:
                return self._make(kind, arguments, named)
            case nn.Module() as module:
                return self._call_function(type(module).forward, [called, *arguments], named)
        return self._call_function(_attribute(called, "__call__"), [called, *arguments], named)

    def _call_special(self, holder: Value, name: str, *others: Value) -> Value | None:
        """Visit a method that the program's class defines for an operator, a builtin or a statement."""
        return self._call_function(_attribute(holder, name), [holder, *others], {})

    def _operate(self, operator: ast.operator | ast.cmpop, left: Value, right: Value) -> Value | None:
        """Visit the method of one of two objects that defines an operator."""
        name = OPERATORS.get(type(operator))
        found = self._call_special(left, f"__{name}__", right)
        return found or self._call_special(right, f"__r{name}__", left)

    def _make(self, kind: type, arguments: Sequence[Value], named: Mapping[str, Value]) -> Value:
        given, begin = [*arguments, *named.values()], attribute_of(kind, "__init__")
        if not isinstance(begin, FunctionType):  # a library's, such as `list`
            return self._new(kind, self._data_of_call(given))
        made = self._new(kind, _NOWHERE.union(*map(self._values.data_of, given)))
        self._call_function(begin, [made, *arguments], named)
        return made

    def _parent(self) -> Value:
        """Return what `super()` does."""
        kind = self._scope.value_before("__class__").object
        if not (isinstance(kind, type) and self._selves):
            return Value()
        return Value.of(self._values.keep(Parent(kind, self._selves[-1])))

    def _call_function(
        self, function: Any, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        if not isinstance(function, FunctionType):
            return None
        node = self._source.function(function.__code__)
        if node is None:  # a decorator of a library, perhaps
            return self._call_function(vars(function).get("__wrapped__"), arguments, named)
        defaults = {**_defaults_of(function), **named}
        return self._inline(function, node, Scope.of_function(function), arguments, defaults)

    def _inline(
        self,
        function: object,
        node: Function,
        scope: Scope,
        arguments: Sequence[Value],
        named: Mapping[str, Value],
    ) -> Value | None:
        """Visit the body of a function; None if that runs already, or too deep in others."""
        if len(self._running) == _MOST_CALLS or any(each is function for each in self._running):
            return None
        outer, self._scope = self._scope, self._values.keep(scope)
        self._running.append(function)
        self._returned.append([])
        self._selves.append(arguments[0] if arguments else Value())
        self._bind(node.args, arguments, named)
        if isinstance(node, ast.Lambda):
            self._returned[-1].append(self.visit(node.body))
        else:
            self._run(node.body)
        self._scope = outer
        self._running.pop()
        self._selves.pop()
        returned = self._returned.pop()
        return join(returned) if returned else Value()

    def _bind(self, parameters: ast.arguments, given: Sequence[Value], named: Mapping[str, Value]) -> None:
        names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
        values = {**named, **dict(zip(names, given, strict=False))}
        rest = [*given[len(names) :], *(value for name, value in named.items() if name not in names)]
        others = Value(_NOWHERE.union(*map(self._values.data_of, rest)))
        for each in (parameters.vararg, parameters.kwarg):
            if each is not None:
                self._values.put(self._scope.place_of(each.arg), others, each.arg)
        for name in (*names, *(each.arg for each in parameters.kwonlyargs)):
            bound = values.get(name, Value())
            self._values.put(self._scope.place_of(name), replace(bound, name=bound.name or name), name)


class _Parts(list[Value]):
    """The values in a tuple."""


def _defaults_of(function: FunctionType) -> Mapping[str, Value]:
    """Return the values of parameters that are not given."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    found = {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: Value.of(value, name) for name, value in found.items()}


def _attribute(holder: Value, name: str) -> Any:
    if isinstance(holder.object, Parent):
        return holder.object.function(name)
    return attribute_of(holder.object, name) if holder.is_known else UNKNOWN


def _is_tower(found: object) -> bool:
    return type(found).__module__.partition(".")[0] == "samestep"


def _is_own(found: Any, name: str) -> bool:
    """Say whether an attribute is an object's own, and none of its class, which would be bound."""
    kind = found.kind if isinstance(found, NewObject) else type(found)
    is_of_class = any(name in vars(each) for each in ([] if kind is None else kind.__mro__))
    return isinstance(found, (ModuleType, type)) or not (is_of_class or isinstance(found, Parent))
