"""Visits what a program's code calls, and reads and sets attributes of objects."""

from __future__ import annotations

import ast
import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from samestep.errors import is_ours
from samestep.watching.program.code_values import (
    MISSING,
    UNKNOWN,
    LocalFunction,
    Method,
    MethodCall,
    NewObject,
    Parent,
    Place,
    Scope,
    Value,
    attribute_of,
    is_buffer,
    join,
    kind_of,
)
from samestep.watching.program.parameters import by_name, defaults_of, positional_names, switches_of
from samestep.watching.program.place_values import PlaceValues
from samestep.watching.program.source_code import Computed, Function, SourceCode
from samestep.watching.program.syntax import OPERATORS, OVERWRITING, is_in_place, is_unpacked

__all__ = ["NOWHERE", "Calls"]

NOWHERE = frozenset[Place]()

_CHANGING = {"add", "append", "appendleft", "extend", "insert", "pop", "popitem", "popleft", "update"}
_EMPTYING = {"clear", "fill", "reset"}
_SPECIAL: Mapping[int, str] = {
    id(float): "__float__",
    id(int): "__int__",
    id(bool): "__bool__",
    id(abs): "__abs__",
    id(len): "__len__",
    id(next): "__next__",
}
_CALLED = (FunctionType, MethodType, Method, LocalFunction, partial)
_MOST_CALLS = 8  # one within the other


class Calls(ast.NodeVisitor, ABC):
    """The objects and functions of a turn.

    Args:
        source: where functions are found.
    """

    _most_nodes = 10_000
    """Of a program's code; nothing is visited after so many, or after code that is nested too deeply."""

    def __init__(self, source: SourceCode) -> None:
        self._source = source
        self._scope = Scope()
        self._values = PlaceValues()
        self._found: dict[int, frozenset[Place]] = {}  # by nodes of expressions that were visited
        self._switches: dict[Place, bool] = {}  # parameters that are known
        self._gives_all = False  # to the next function, what the program gives it
        self._running: list[object] = []
        self._selves: list[Value] = []  # the first arguments of functions that are running
        self._returned: list[list[Value]] = []
        self._num_nodes = 0
        self._is_visiting = False

    def visit(self, node: ast.AST) -> Value:
        """Visit a statement or expression; return the value of an expression."""
        self._num_nodes += 1
        outer, self._is_visiting = self._is_visiting, True
        value = Value()
        try:
            if self._num_nodes < self._most_nodes:
                value = super().visit(node) or value
        except RecursionError:
            if outer:
                raise
            self._num_nodes = self._most_nodes
        self._is_visiting = outer
        if isinstance(node, ast.expr):
            self._note(node, self._values.data_of(value))
        return value

    @abstractmethod
    def _entry(self, holder: Value, index: ast.expr) -> Value:
        """Return the value of an entry."""

    @abstractmethod
    def _run(self, body: Iterable[ast.AST]) -> None:
        """Visit statements."""

    def _data(self, node: ast.expr) -> frozenset[Place]:
        return self._values.data_of(self.visit(node))

    def _note(self, node: Computed, sources: frozenset[Place]) -> None:
        self._found[id(node)] = self._found.get(id(node), NOWHERE).union(sources, self._values.deciding)

    # ---- attributes ----------------------------------------------------------------------------------

    def _set_attribute(self, holder: Value, name: str, value: Value) -> None:
        if isinstance(found := _attribute(holder, name), property):
            self._call_function(found.fset, [holder, value], {})
        elif name == "data" and isinstance(holder.object, Tensor):
            self._write(holder, self._values.data_of(value), is_new=True)
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
                return self._bound(function, Value.of(kind_of(holder), holder.name))
            case staticmethod(__func__=function):
                return Value.of(function, name)
            case found if found is MISSING or isinstance(holder.object, NewObject):
                return Value(holder.sources)
            case found if found is UNKNOWN and holder.is_known and holder.is_container:
                return Value(holder.sources)  # a method, such as `get` of a dict
            case found:
                return self._before(holder, place, found)

    def _before(self, holder: Value, place: Place, found: Any) -> Value:
        """Return the value that an attribute has before the turn: of a buffer, the same for all passes."""
        value = Value.before(place, f"{place.name} of {holder.name}", found)
        if is_buffer(holder.object, place.name):
            return self._values.keep_same(value, place)
        return self._values.read(value).computed_from(holder.sources)

    def _bound(self, function: FunctionType, holder: Value) -> Value:
        """Return a method of an object."""
        of = holder.object.of if isinstance(holder.object, Parent) else holder
        return Value.of(self._values.keep(Method(function, of)), of.name)

    def _new(self, kind: type | None, sources: frozenset[Place], parts: Sequence[Value] = ()) -> Value:
        made = self._values.keep(NewObject(kind, parts))
        return Value(sources, made, made)

    # ---- calls ---------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Value:
        """Visit what the call runs; return what that returns."""
        called, holder, method = self._callee(node.func)
        arguments = [self.visit(each.value if isinstance(each, ast.Starred) else each) for each in node.args]
        named = self._visit_named((each.arg, each.value) for each in node.keywords)
        if called.object is super and not arguments:
            return self._parent()
        # Other objects may define `==` in their own way.
        match called.object if isinstance(called.object, BuiltinFunctionType) else None, arguments:
            case builtins.getattr, [of, Value(object=str(name)), *default]:
                return self._attribute_value(of, name).computed_from(*map(self._values.data_of, default))
            case builtins.hasattr, [of, Value(object=str(name))]:
                return Value(of.sources | {Place(of.key, name)})
            case builtins.setattr, [of, Value(object=str(name)), new]:
                self._set_attribute(of, name, new)
                return Value()
        self._gives_all = not any(map(is_unpacked, (*node.args, *node.keywords)))
        returned = self._call_object(called, arguments, named)
        self._gives_all = False
        if returned is not None:
            return returned.computed_from(called.sources)  # a variable may hold another function
        if method == "get" and holder.is_container and arguments and arguments[0].text:
            return self._entry(holder, node.args[0]).computed_from(*map(self._values.data_of, arguments))
        given = self._data_of_call([*arguments, *named.values()])
        sources = given if method in OVERWRITING else called.sources | given
        self._change(MethodCall(holder, method, arguments, named, sources))
        returned_of = self._returned_of(called, sources | self._advance(holder))
        if not is_in_place(method):
            return Value(returned_of)
        self._write(holder, given, is_new=method in OVERWRITING)
        return holder.computed_from(returned_of)

    def _callee(self, node: ast.expr) -> tuple[Value, Value, str]:
        """Return what is called; if that is a method, also its object and its name."""
        if not isinstance(node, ast.Attribute):
            return self.visit(node), Value(), ""
        holder = self.visit(node.value)
        called = self._attribute_value(holder, node.attr)
        is_set = holder.key is not None and self._values.get(Place(holder.key, node.attr)) is not None
        return (called, Value(), "") if is_set else (called, holder, node.attr)

    def _returned_of(self, called: Value, sources: frozenset[Place]) -> frozenset[Place]:
        """Return what a library's function computes its result from: its arguments and its object."""
        return sources

    def _change(self, call: MethodCall) -> None:
        """Change a container, or a library's object, as a method of this name does."""
        holder, method, arguments = call[:3]
        if method in _EMPTYING or method in OVERWRITING:
            self._values.empty(holder)
        if method == "update" and holder.is_dict and self._update(holder, arguments, call.named):
            return
        if method in _CHANGING:
            self._values.fill(holder, call.sources, is_change=True)
        if method == "append" and len(arguments) == 1:
            self._values.set_last(holder, arguments[0])

    def _write(self, holder: Value, sources: frozenset[Place], *, is_new: bool) -> None:
        """Set a tensor that a variable or an attribute is; if not `is_new`, from what it was, too."""
        if isinstance(holder.key, Place) and isinstance(holder.object, Tensor):
            old = NOWHERE if is_new else holder.sources
            self._values.put(holder.key, holder._replace(sources=old | sources), holder.name)

    def _update(self, holder: Value, arguments: Sequence[Value], named: Mapping[str, Value]) -> bool:
        """Set entries with constant names; say whether these are all."""
        parts = [dict(named), *map(self._values.named_in, arguments)]
        if not any(parts) or not all(parts[1:]) or "" in named:
            return False
        for each in parts:
            self._hold(holder, each)
        return True

    def _visit_named(self, parts: Iterable[tuple[str | None, ast.expr]]) -> dict[str, Value]:
        """Visit what is given by names, or as `**values` if these are None; return other values by ""."""
        found: dict[str, Value] = {}
        for name, node in parts:
            value = self.visit(node)
            if name is None and (named := self._values.named_in(value)):
                found.update(named)
                value = Value(self._values.unnamed_in(value))
            if not name:
                value = value.computed_from(self._values.data_of(found.get("", Value())))
            found[name or ""] = value
        return found

    def _data_of_call(self, given: Iterable[Value]) -> frozenset[Place]:
        """Return what a library's function computes from its arguments; it may call these, or iterate."""
        sources = NOWHERE
        for each in given:
            returned = self._call_object(each, [], {}) if isinstance(each.object, _CALLED) else None
            sources |= self._advance(each) | self._values.data_of(returned or Value())
        return sources

    def _advance(self, value: Value) -> frozenset[Place]:
        """Note that elements of an iterator are taken, if it is one; return what these are computed from."""
        frame = value.object.gi_frame if isinstance(value.object, GeneratorType) else None
        if frame is not None and is_ours(frame):  # the one of the towers
            return NOWHERE
        if hasattr(type(value.object), "__next__"):
            self._values.fill(value, NOWHERE, is_change=True)
        if frame is not None:
            self._resume(value.object, frame, self._values.data_of(value))
        return self._values.data_of(value)

    def _resume(self, generator: object, frame: FrameType, deciding: frozenset[Place]) -> None:
        """Visit the body of a generator, where all depends on how often it has been resumed."""
        node = self._source.function(frame.f_code)
        if node is not None:
            with self._values.decided_by(deciding):
                self._inline(generator, node, Scope.of_frame(frame), [], {})

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
            case (type() | BuiltinFunctionType()) as builtin if id(builtin) in _SPECIAL and arguments:
                return self._call_special(arguments[0], _SPECIAL[id(builtin)])
            case type() as kind:
                return self._make(kind, arguments, named)
            case nn.Module() as module:
                forward = attribute_of(type(module), "forward")
                return self._call_function(forward, [called, *arguments], named)
            case NewObject(kind=type() as kind) if issubclass(kind, nn.Module):
                return self._call_function(attribute_of(kind, "forward"), [called, *arguments], named)
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
        made = self._new(kind, NOWHERE.union(*map(self._values.data_of, (*arguments, *named.values()))))
        begin = attribute_of(kind, "__init__")
        if self._call_function(begin, [made, *arguments], named) is not None:
            return made
        # A library's, such as `list`, or one without code, such as a dataclass.
        names = positional_names(begin)[1:]
        given = by_name(names, arguments, named)
        of_names = {name: value.computed_from(self._data_of_call([value])) for name, value in given.items()}
        others = [*arguments[len(names) :], of_names.pop("", Value())]
        made = made._replace(sources=self._data_of_call(others))
        self._hold(made, of_names)
        return made

    def _hold(self, made: Value, values: Mapping[str, Value]) -> None:
        """Set attributes, or entries, of a new object."""
        for name, value in values.items():
            self._values.put(Place(made.key, name), value, f"{name} of {made.name}" if made.name else name)

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
        defaults = {**defaults_of(function), **named}
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
        outer, self._scope = self._scope, scope
        self._running.append(function)
        self._returned.append([])
        self._selves.append(arguments[0] if arguments else Value())
        self._bind(node, arguments, named)
        self._gives_all = False
        if isinstance(node, ast.Lambda):
            self._returned[-1].append(self.visit(node.body))
        else:
            self._run(node.body)
        self._scope = outer
        self._running.pop()
        self._selves.pop()
        return join(self._returned.pop() or [Value()])

    def _bind(self, node: Function, given: Sequence[Value], named: Mapping[str, Value]) -> None:
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        values = {**named, **dict(zip(names, given, strict=False))}
        rest = [*given[len(names) :], *(value for name, value in named.items() if name not in names)]
        others = Value(NOWHERE.union(*map(self._values.data_of, rest)))
        for each in (node.args.vararg, node.args.kwarg):
            if each is not None:
                self._values.put(self._scope.place_of(each.arg), others, each.arg)
        for name in (*names, *(each.arg for each in node.args.kwonlyargs)):
            bound = values.get(name, Value())
            self._values.put(self._scope.place_of(name), bound._replace(name=bound.name or name), name)
        if self._gives_all:
            self._switches |= {self._scope.place_of(name): on for name, on in switches_of(node, values)}


def _attribute(holder: Value, name: str) -> Any:
    if isinstance(holder.object, Parent):
        return holder.object.function(name)
    return attribute_of(holder.object, name) if holder.is_known else UNKNOWN


def _is_own(found: Any, name: str) -> bool:
    """Say whether an attribute is an object's own, and none of its class, which would be bound."""
    kind = found.kind if isinstance(found, NewObject) else type(found)
    is_of_class = any(name in vars(each) for each in ([] if kind is None else kind.__mro__))
    return isinstance(found, (ModuleType, type)) or not (is_of_class or isinstance(found, Parent))
