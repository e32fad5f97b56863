"""Follows what code computes from a worker's passes, which are only some of a step, and from its clock."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_values import (
    MethodCall,
    NewObject,
    Place,
    Scope,
    Value,
    is_buffer,
    is_loader,
    is_method_of,
    is_object_of,
    is_of_samestep,
    kind_of,
)
from samestep.watching.program.parameters import by_name
from samestep.watching.program.random_functions import is_random
from samestep.watching.program.source_code import Function, SourceCode
from samestep.watching.program.syntax import (
    OVERWRITING,
    branch_without_value,
    computes_from_itself,
    constant_number,
    ends_program,
    is_backward,
    is_collective,
    is_in_place,
)
from samestep.watching.program.worker_values import WorkerValues

__all__ = ["CLOCK", "LEFT", "OWN", "PASSES", "ROWS", "PassResults"]

PASSES = Place("the passes of this worker", "")
ROWS = Place("the rows of this worker", "")
CLOCK = Place("this worker's clock", "")

OWN = frozenset({PASSES, ROWS, CLOCK})
"""What each worker has of its own; a place's holder is its name."""

LEFT = Place("what passes of earlier steps have left", "")
"""A source, beside `PASSES`, of what code outside of passes computes from their results."""

INDEX = Place("the index of a tower", "")
"""A source, beside `PASSES`, of what is computed from it: towers may keep state of their own."""

_ALL = OWN | {LEFT}

_COUNT = frozenset({PASSES})
"""The sources of what depends on how many passes there are."""

_OF_A_PASS = Value(frozenset({PASSES}))
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
_BATCHES = ("LocalBatch", "object")  # of a class that is not known
_PARTS_OF_LOADER = ("dataset", "source", "sampler", "order", "collate_fn")
_EXAMPLES = ("__getitem__", "__iter__")
_ADDING = {"add", "append", "appendleft", "extend", "insert"}
_COUNTING = {"append", "appendleft", "extend", "insert"}
_BEFORE, _AFTER = ("on_start", "before_step"), ("after_step", "after_evaluation", "on_end")  # of callbacks


class PassResults(WorkerValues):
    """Values with some of `OWN` among their sources, if they are computed from these.

    Not what samestep returns, such as a report, what `gather` returns, or what collectives have made the same
    on all workers. Loops around the step are visited twice, because its results may be used in the next step.

    Args:
        source: where functions are found.
        loops: those that are running.
    """

    _most_nodes = 30_000  # about a second, once
    _of_configuration = WorkerValues._of_configuration | {CLOCK}

    def __init__(self, source: SourceCode, loops: Sequence[ast.For | ast.While]) -> None:
        super().__init__(source)
        self._loops = loops
        self._is_in_pass = self._is_again = False
        self._kept_by_row: list[Value] = []  # what the current passes keep by numbers of their rows
        self._filling = set[int]()  # nodes that run where something has no value yet, as for a cache
        self._parts: dict[Place, NewObject] = {}  # attributes of new objects, if code does not set them
        self._buffers = set[Hashable]()  # places that are, or may be, and the objects that are such parts
        self._layers: dict[Hashable, Sequence[Value]] = {}  # of those that the code makes
        self._around: list[ast.stmt] = []  # the loops, in a function, around the current statement

    @property
    def _decided_by(self) -> frozenset[Place]:
        """What it depends on whether the current statement runs, if that is outside of passes."""
        return NOWHERE if self._is_in_pass else self._values.deciding & OWN

    # ---- passes --------------------------------------------------------------------------------------

    def visit_For(self, node: ast.For) -> None:
        """Visit the passes of a step; or another loop, twice if the step is in it."""
        self._around.append(node)
        if self._takes_towers(node.iter):
            with self._passes():
                super().visit_For(node)
        elif node in self._loops:
            self._visit_twice(lambda: super(PassResults, self).visit_For(node))
        else:
            super().visit_For(node)
        self._around.pop()

    def visit_While(self, node: ast.If | ast.While) -> None:
        """Visit a loop; twice, and as one that surely runs, if the step is in it."""
        self._around.append(node)
        if node in self._loops:
            self._visit_twice(lambda: self._run([node.test, *node.body]))
            self._run([node.test, *node.orelse])
        else:
            self.visit_If(node)
        self._around.pop()

    def _visit_twice(self, visit: Callable[[], None]) -> None:
        """Visit a loop twice, and those in it twice only in the first visit."""
        visit()
        if not self._is_again:
            self._is_again = True
            visit()
            self._is_again = False

    @contextmanager
    def _passes(self) -> Iterator[None]:
        outer, self._is_in_pass = self._is_in_pass, True
        yield
        self._is_in_pass = outer
        for holder in self._kept_by_row:
            self._values.fill(holder, frozenset({LEFT}), is_change=True)
        self._kept_by_row.clear()

    def _takes_towers(self, node: ast.expr) -> bool:
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
        return any(is_object_of("Towers", self.visit(each.func)) for each in calls)

    def _elements(self, node: ast.expr) -> Sequence[Value]:
        """Return the values that a loop takes; the batch of towers is computed before their passes."""
        outer, self._is_in_pass = self._is_in_pass, self._is_in_pass and not self._takes_towers(node)
        found = super()._elements(node)
        self._is_in_pass = outer
        return found

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Set what is on the left: in passes, it depends on how many of them there are."""
        with self._values.decided_by(_COUNT if self._is_in_pass else NOWHERE):
            super().visit_AugAssign(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Set what is on the left: in passes, `n = n + 1` depends on how many of them there are."""
        counts = self._is_in_pass and computes_from_itself(node)
        with self._values.decided_by(_COUNT if counts else NOWHERE):
            super().visit_Assign(node)

    def _returned_of(self, called: Value, sources: frozenset[Place]) -> frozenset[Place]:
        if any(called.object is clock for clock in _CLOCKS):
            return frozenset({CLOCK})
        if is_object_of("Towers", called):
            return sources - {LEFT} | {PASSES}  # a batch is checked itself
        if is_object_of("Step", called):
            self._visit_step(called)
        if is_object_of("Evaluation", called):
            self._visit_pass(self._attribute_value(called, "measure"))
        return sources - _ALL if _is_of_samestep(called) else sources

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        """Visit what a call runs, and what samestep calls in it, if that is code of the program."""
        if self._is_in_pass and is_random(called.object) and "generator" not in named:
            return Value(_COUNT)  # the numbers of the tower that has drawn last
        if is_method_of("run", "Trainer", called):
            self._visit_twice(lambda: self._visit_run(called.object.of))
        if is_method_of("whole_batch", "Towers", called):
            given = by_name(("batch", "forward", "loss"), arguments, named)
            self._visit_whole_batch(given.get("forward", Value()), given.get("loss", Value()))
            return Value()
        if not (is_object_of("Elastic", called) and arguments):
            return super()._call_object(called, arguments, named)
        function, *others = arguments
        returned = self._call_object(function, others, named)
        return Value(self._returned_of(function, NOWHERE)) if returned is None else returned

    def _visit_run(self, trainer: Value) -> None:
        self._note_batches(self._advance(self._attribute_value(trainer, "loader")))
        self._visit_callbacks(trainer, _BEFORE)
        self._visit_step(self._attribute_value(trainer, "step"))
        self._visit_callbacks(trainer, _AFTER)

    def _visit_callbacks(self, trainer: Value, methods: Iterable[str]) -> None:
        for callback in self._values.objects_in(self._attribute_value(trainer, "callbacks")):
            for name in methods:
                self._call_object(self._attribute_value(callback, name), [trainer, Value()], {})

    def _note_batches(self, sources: frozenset[Place]) -> None:
        """Note what the batches of a `Trainer` are computed from."""

    def _visit_step(self, step: Value) -> None:
        loss, forward = (self._attribute_value(step, name) for name in ("loss_fn", "forward"))
        if forward.is_known and forward.object is not None:
            self._visit_whole_batch(forward, loss)
        else:
            self._note_loss(self._visit_pass(loss))
        schedule = self._attribute_value(step, "scheduler")
        if not issubclass(kind_of(schedule), LRScheduler):  # whose options are checked where it is made
            self._call_object(self._attribute_value(schedule, "step"), [], {})

    def _visit_whole_batch(self, forward: Value, loss: Value) -> None:
        """Visit a forward, which is a pass, and a loss of all towers' outputs, which is not."""
        self._note_loss(self._visit_pass(forward))
        returned = self._call_object(loss, [], {})
        self._note_whole_loss(self._values.data_of(returned or Value()))

    def _visit_pass(self, function: Value) -> frozenset[Place]:
        """Visit a function that samestep calls with a model and a worker's rows."""
        with self._passes():
            returned = self._call_object(function, [Value(), _OF_A_PASS], {})
        return self._values.data_of(returned or Value())

    def _set(self, target: ast.expr, value: Value) -> None:
        super()._set(target, value.computed_from(self._left_by(value.sources)))
        if isinstance(target, ast.Subscript):
            self._note_entry(target)

    def _change(self, call: MethodCall) -> None:
        holder, method, arguments, named, sources = call
        sources |= self._left_by(sources)
        is_written = is_in_place(method)
        if self._is_in_pass and holder.key in self._buffers and (is_written or method == "extend"):
            return  # as `+=` does
        is_advanced = is_written and method not in OVERWRITING and isinstance(holder.object, NewObject)
        if self._is_in_pass and (method in _COUNTING or is_advanced):
            sources |= _COUNT
        super()._change(call._replace(sources=sources))
        own = (sources | self._values.deciding) & _ALL
        kind = kind_of(holder)
        has_names = any(each.is_dict and self._values.named_in(each) for each in arguments)
        is_of_dict = method == "update" and holder.is_dict and (arguments or "" in named) and not has_names
        is_by_row = is_of_dict and PASSES in sources
        if self._is_in_pass and is_by_row:
            self._kept_by_row.append(holder)
        if own and is_written and (kind is object or issubclass(kind, Tensor)):
            self._values.fill(holder, own, is_change=True)

    def _attribute_value(self, holder: Value, name: str) -> Value:
        """Return an attribute's value; always the same object, if the code makes that which has it."""
        value, place = super()._attribute_value(holder, name), Place(holder.key, name)
        if is_buffer(holder.object, name):
            self._buffers.add(place)
        if name == "index" and PASSES in value.sources:
            return value.computed_from(frozenset({INDEX}))
        is_set, is_new = self._values.get(place) is not None, isinstance(holder.object, NewObject)
        if is_set or value.is_known or value.key is not None or not is_new or is_of_samestep(kind_of(holder)):
            return value
        part = self._parts.setdefault(place, NewObject())
        if issubclass(kind_of(holder), nn.Module):
            self._buffers.update((place, part))
        return Value(value.sources, part, part, name)

    def _set_attribute(self, holder: Value, name: str, value: Value) -> None:
        """Set an attribute; what passes set a buffer to, all workers share after them."""
        if not (self._is_in_pass and Place(holder.key, name) in self._buffers):
            super()._set_attribute(holder, name, value)

    def _write(self, holder: Value, sources: frozenset[Place], *, is_new: bool) -> None:
        if not (self._is_in_pass and holder.key in self._buffers):
            super()._write(holder, sources, is_new=is_new)

    def _advance(self, value: Value) -> frozenset[Place]:
        """Return what elements are computed from; a loader's also from what the program sets in it."""
        found = super()._advance(value)
        if not is_loader(value):
            return found
        parts = [self._attribute_value(value, name) for name in _PARTS_OF_LOADER]
        examples = [self._call_special(each, name) for each in parts for name in _EXAMPLES]
        read = self._data_of_call(parts).union(*map(self._values.all_in, filter(None, (*parts, *examples))))
        return found if read.isdisjoint({PASSES, LEFT}) else found | {PASSES}

    def _note_entry(self, entry: ast.Subscript) -> None:
        """Note what a pass changes by a number of a row, such as that of an example.

        Not a cache, which is filled once; nor a module's tensor, which may be a buffer, and is watched.
        """
        if not self._is_in_pass or id(entry) in self._filling:
            return
        holder, sources = self.visit(entry.value), self._values.data_of(self.visit(entry.slice))
        may_be_buffer = any(holder.object is each for each in self._parts.values())
        if PASSES in sources and INDEX not in sources and not may_be_buffer:
            self._kept_by_row.append(holder)

    def _left_by(self, sources: frozenset[Place]) -> frozenset[Place]:
        """Return `LEFT` if what code sets is computed from results outside of passes."""
        is_left = not self._is_in_pass and {PASSES, ROWS} & (sources | self._values.deciding)
        return frozenset({LEFT}) if is_left else NOWHERE

    def _note_loss(self, sources: frozenset[Place]) -> None:
        """Note what the loss of a pass is computed from."""

    def _note_whole_loss(self, sources: frozenset[Place]) -> None:
        """Note what the loss of the whole batch is computed from, beside its outputs."""

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        """Return an attribute's value; `slices` of a loader's batch are the rows that this worker has."""
        value = super().visit_Attribute(node)
        may_be_batch = node.attr == "slices" and kind_of(self.visit(node.value)).__name__ in _BATCHES
        return value.computed_from(frozenset({ROWS})) if may_be_batch else value

    def _make(self, kind: type, arguments: Sequence[Value], named: Mapping[str, Value]) -> Value:
        made = super()._make(kind, arguments, named)
        if kind is nn.Sequential:
            self._layers[made.key] = arguments
        return made

    def _object_at(self, holder: Value, index: ast.expr) -> Value | None:
        """Return the object in a container that is known, or a layer of one that the code makes."""
        layers, number = self._layers.get(holder.key, ()), constant_number(index)
        if number is not None and -len(layers) <= number < len(layers):
            return layers[number]
        return super()._object_at(holder, index)

    # ---- what is the same on all workers -------------------------------------------------------------

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Value:
        """Return a text, by which nothing is decided."""
        self.generic_visit(node)
        return Value()

    def visit_Call(self, node: ast.Call) -> Value:
        """Return what a call returns; a collective's arguments are the same on all workers afterwards."""
        value = super().visit_Call(node)
        given = NOWHERE.union(*(self._found.get(id(each), NOWHERE) for each in node.args))
        match node.func:
            case ast.Attribute(value=ast.Subscript() as entry, attr=method) if method in _ADDING:
                self._note_entry(entry)
                if self.visit(entry).key is None:  # it is not known which one it is
                    self._values.fill(self.visit(entry.value), given, is_change=True)
        if self._is_in_pass and is_backward(node.func):
            self._note_loss(given)
        if not is_collective(node):
            return value
        self._share([*node.args, *(each.value for each in node.keywords)])
        return _shared(value)

    def visit_If(self, node: ast.If | ast.While) -> None:
        """Visit both branches; a collective in one of them runs if there are several workers."""
        filling = branch_without_value(node) or ()
        self._filling.update(id(each) for statement in filling for each in ast.walk(statement))
        super().visit_If(node)
        for call in self._source.find(is_collective, [node]):
            assert isinstance(call, ast.Call)
            self._share(call.args)

    def _share(self, arguments: Iterable[ast.expr]) -> None:
        for each in arguments:
            value = self.visit(each)
            self._values.empty(value)
            if isinstance(each, (ast.Name, ast.Attribute)):
                self._set(each, _shared(value))

    def _inline(
        self,
        function: object,
        node: Function,
        scope: Scope,
        arguments: Sequence[Value],
        named: Mapping[str, Value],
    ) -> Value | None:
        """Visit the body of a function, which is the same on all workers if there is a collective in it."""
        outer, self._around = self._around, []
        value = super()._inline(function, node, scope, arguments, named)
        self._around = outer
        return _shared(value) if value is not None and self._source.find(is_collective, [node]) else value

    def _deciding_in(
        self, bodies: Sequence[Sequence[ast.stmt]], sources: frozenset[Place]
    ) -> frozenset[Place]:
        """Return what decides. If one branch ends the program, nothing: other workers are told."""
        ends = any(body and ends_program(body[-1]) for body in bodies)
        return super()._deciding_in(bodies, sources) - (_ALL if ends else NOWHERE)


def _shared(value: Value) -> Value:
    return value._replace(sources=value.sources - _ALL)


def _is_of_samestep(called: Value) -> bool:
    if isinstance(called.object, FunctionType):
        return is_of_samestep(called.object)
    return not isinstance(called.object, type) and is_of_samestep(kind_of(called))
