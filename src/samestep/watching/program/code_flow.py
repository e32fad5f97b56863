"""Follows values through a program's source code: what each is computed from, of what a turn begins with.

A turn is one run of the body of the loop over towers. This visits its statements in order, and those of the
program's functions that it calls. Of two branches, both may have run. Iterators from before the turn change
when elements are taken from them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_values import MethodCall, Place, Scope, Value, is_of_samestep
from samestep.watching.program.expressions import Expressions
from samestep.watching.program.place_values import ENTRIES, numbered
from samestep.watching.program.program_line import frames_of_program, has_resumed
from samestep.watching.program.source_code import Computed, SourceCode
from samestep.watching.program.syntax import (
    OPERATORS,
    branch_without_value,
    constant_number,
    is_backward,
    is_whole,
    loaded,
    parallel_names,
    sets_place,
)

__all__ = ["CodeFlow"]

_SEEDING = {"manual_seed", "seed", "set_state", "setstate"}


class CodeFlow(Expressions):
    """The values of a turn.

    Args:
        source: where functions are found.
    """

    def __init__(self, source: SourceCode) -> None:
        super().__init__(source)
        self._has_loop = False
        self._losses = NOWHERE  # what they are computed from
        self._num_branches = 0  # around what is visited
        self._first_uses: dict[int, str] = {}  # of libraries' objects, by id: a method, or "" for others

    @classmethod
    def of_running_loop(cls, source: SourceCode, function: Callable[..., Any] | None = None) -> Self:
        """Return the values of the loop that takes its next tower, and of generators before it.

        If that is none of the program's, it calls `function` with a tower's batch.
        """
        flow = cls(source)
        for frame in frames_of_program():
            if (loop := source.loop_in(frame, has_called_next=has_resumed(frame))) is not None:
                flow.run_loop(loop, Scope.of_frame(frame))
                if not any(isinstance(node, ast.Yield) for node in ast.walk(loop)):
                    break  # what is around it runs once a step
        if function is not None:
            flow._has_loop = True
            flow.run_function(function, [])
        return flow

    def run_loop(self, loop: ast.For | ast.While, scope: Scope) -> None:
        """Visit the body of a loop."""
        self._scope, self._has_loop = scope, True
        if isinstance(loop, ast.While):
            self._run([loop.test, *loop.body])
            return
        self._set(loop.target, Value())
        names = parallel_names(loop)
        beside = [name for name in names if not is_of_samestep(type(scope.objects.get(name)))]
        for name in beside if len(beside) < len(names) else ():  # one of them is the tower
            place = scope.place_of(name)
            self._values.put(place, Value(frozenset({place})), name)
            self._note_taken(loop, frozenset({place}))
        self._run(loop.body)

    def run_function(self, function: Callable[..., Any], arguments: Sequence[Value]) -> None:
        """Visit a function that returns a loss, or a part of it; missing arguments depend on nothing."""
        returned = self._call_object(Value.of(function), arguments, {})
        self._losses |= self._values.data_of(returned or Value())

    def object_at(self, node: ast.expr, scope: Scope) -> object:
        """Return the object that an expression is; `UNKNOWN` if that is not known."""
        self._scope = scope
        return self.visit(node).object

    def sets_anew(self, found: object, name: str) -> bool:
        """Say whether an object's attribute is set, and no expression depends on what it was before.

        Of an array, each entry may be, if no loss depends on all of them. False if no loop was visited.
        """
        held = vars(found).get(name)
        size = held.size if isinstance(held, np.ndarray) and held.ndim == 1 else 0
        entries = [Place(id(held), numbered(each)) for each in range(size)]
        are_apart = size > 0 and Place(id(held), ENTRIES) not in self._losses
        return self._has_loop and (
            self._are_set_anew([Place(id(found), name)]) or (are_apart and self._are_set_anew(entries))
        )

    def _are_set_anew(self, places: Sequence[Place]) -> bool:
        are_read = not NOWHERE.union(*self._found.values()).isdisjoint(places)
        return all(map(self._values.is_changed, places)) and not are_read

    def seeds_first(self, generator: object) -> bool:
        """Say whether the turn, in any case, seeds a random generator before it uses it."""
        return self._first_uses.get(id(generator)) in _SEEDING

    def carried_in(self, nodes: Iterable[Computed]) -> set[str] | None:
        """Return the names of what expressions are computed from, and the turn sets; None if not visited."""
        found = [self._found[id(node)] for node in nodes if id(node) in self._found]
        return self._values.names_of_changed(NOWHERE.union(*found)) if found else None

    def carried_into_loss(self, nodes: Iterable[Computed]) -> set[str] | None:
        """Return those of these names from which losses are computed, too."""
        found = [self._found[id(node)] & self._losses for node in nodes if id(node) in self._found]
        return self._values.names_of_changed(NOWHERE.union(*found)) if found else None

    def visit_Call(self, node: ast.Call) -> Value:
        """Note the losses that towers get."""
        value = super().visit_Call(node)
        if is_backward(node.func):
            given = [*node.args, *(each.value for each in node.keywords)]
            self._losses = self._losses.union(*(self._found.get(id(each), NOWHERE) for each in given))
        return value

    def _change(self, call: MethodCall) -> None:
        self._first_uses.setdefault(id(call.holder.object), "" if self._num_branches else call.method)
        for each in call.given:
            self._first_uses.setdefault(id(each.object), "")
        super()._change(call)

    def _set_attribute(self, holder: Value, name: str, value: Value) -> None:
        match holder.key, name:
            case Place(holder=int(generator), name="bit_generator"), "state":
                self._first_uses.setdefault(generator, "" if self._num_branches else "set_state")
        super()._set_attribute(holder, name, value)

    # ---- statements ----------------------------------------------------------------------------------

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
            self._change(MethodCall(old, "extend", [other], {}, sources))
        else:
            self._set(node.target, Value(sources))

    def visit_Return(self, node: ast.Return) -> None:
        """Note what the function returns."""
        value = Value() if node.value is None else self.visit(node.value)
        if self._returned:
            self._returned[-1].append(value.computed_from(self._values.deciding))

    def visit_Yield(self, node: ast.Yield) -> Value:
        """Note what a generator's elements are computed from; what is sent to it is not known."""
        value = Value() if node.value is None else self.visit(node.value)
        self._note_yielded(self._values.data_of(value))
        return Value()

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Value:
        """Note what another generator's elements are computed from."""
        self._note_yielded(self._advance(self.visit(node.value)))
        return Value()

    def _note_yielded(self, sources: frozenset[Place]) -> None:
        if self._returned:
            self._returned[-1].append(Value(sources | self._values.deciding))

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Visit both branches. What they set does not decide, such as a cache that one of them fills.

        Visit one of them if a parameter that is not given says so.
        """
        deciding = self._data(node.test)
        if (is_on := self._switched(node.test)) is not None:
            self._run(node.body if is_on else node.orelse)
            return
        places = frozenset(self._places_set_in([*node.body, *node.orelse]))
        asked = (each for each in places if not {each, Place(each.holder, ENTRIES)}.isdisjoint(deciding))
        filling = branch_without_value(node) if any(asked) else None
        bodies = [node.orelse, node.body] if filling is node.orelse else [node.body, node.orelse]
        self._branch(bodies, deciding - places, NOWHERE if filling is None else places)

    visit_While = visit_If  # its body may not run

    def _switched(self, test: ast.expr) -> bool | None:
        """Return what a parameter that is asked for is; None if that is not known, or for another test."""
        match test:
            case ast.Name(id=name):
                return self._switches.get(self._scope.place_of(name))
            case ast.UnaryOp(op=ast.Not(), operand=asked) if (is_on := self._switched(asked)) is not None:
                return not is_on
        return None

    def visit_For(self, node: ast.For) -> None:
        """Visit the body for each known object, or once."""
        for each in self._elements(node.iter):
            self._note_taken(node, each.sources)
            self._set(node.target, each)
            self._run(node.body)
        self._run(node.orelse)

    def _note_taken(self, loop: ast.For, sources: frozenset[Place]) -> None:
        """Note what a loop's elements are computed from, where Python takes them: since 3.13, in `iter`."""
        self._note(loop, sources)
        self._note(loop.iter, sources)

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
        bodies: Sequence[Sequence[ast.stmt]],
        deciding: frozenset[Place] = NOWHERE,
        filled: frozenset[Place] = NOWHERE,
    ) -> None:
        deciding = self._deciding_in(bodies, deciding)
        self._num_branches += 1
        self._values.branch([partial(self._run, body) for body in bodies], deciding, filled)
        self._num_branches -= 1

    def _deciding_in(
        self, bodies: Sequence[Sequence[ast.stmt]], sources: frozenset[Place]
    ) -> frozenset[Place]:
        """Return what decides which branch runs, of what the choice is computed from."""
        return sources

    def _places_set_in(self, body: Sequence[ast.stmt]) -> Iterator[Place]:
        """Yield the variables, attributes and containers that statements set."""
        for node in self._source.find(sets_place, body):
            match node:
                case ast.Name(id=name):
                    yield self._scope.place_of(name)
                case ast.Attribute(value=of, attr=name):
                    yield Place(self.visit(of).key, name)
                case ast.Call(args=[of, index, _]):
                    yield Place(self.visit(of).key, self.visit(index).text)
                case ast.Subscript(value=of, slice=index):
                    number = constant_number(index)
                    name = self.visit(index).text if number is None else numbered(number)
                    yield Place(self.visit(of).key, ENTRIES)
                    yield Place(self.visit(of).key, name)
