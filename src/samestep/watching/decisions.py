"""Finds what a program decides by the number of workers, by a worker's own passes or by its clock.

Examples are a learning rate, a batch size, a number of steps, and which weights are kept. All workers may
compute the same, so comparing them may show nothing. The program's source code does.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samestep.errors import warn
from samestep.watching.program.calls import NOWHERE
from samestep.watching.program.code_values import (
    MISSING,
    UNKNOWN,
    MethodCall,
    NewObject,
    Place,
    Scope,
    Value,
    attribute_of,
    is_loader,
    is_of_samestep,
    kind_of,
)
from samestep.watching.program.effects import changes_layers, is_setting, name_of_change, settings_of
from samestep.watching.program.pass_results import CLOCK, LEFT, OWN, PASSES, ROWS, PassResults
from samestep.watching.program.program_line import ProgramLine, frames_of_program
from samestep.watching.program.source_code import SourceCode
from samestep.watching.program.syntax import edited_by, is_in_place
from samestep.watching.program.worker_values import NUM_WORKERS

__all__ = ["check_decisions", "check_outside_gradients"]

_WITHOUT_EFFECT = ("num_workers", "prefetch_factor")
"""Parameters of loaders on which no result depends."""

_LEFT_OUT = {
    "optimizer": OWN,
    "parameters": OWN,
    "params": OWN,
    "batch": frozenset({ROWS}),
}
"""What does not count in arguments: contents of objects that are no settings, and a batch's slices."""

_OPTIONS: Mapping[str, str] = {
    "lr": "a learning rate",
    **{name: f"the option {name}" for name in ("betas", "initial_lr", "momentum", "weight_decay")},
}
"""Entries of an optimizer's groups, and what these are, in words."""

_BATCHES = "the batches of the loop"

_SEEDING = ("manual_seed", "manual_seed_all", "seed")
"""Functions, and methods of generators, that take a seed."""

_WEIGHTS = ("bias", "weight")
"""Attributes that are parameters, if nothing else is known of them."""

_REMEDIES = {
    PASSES: "Each worker runs only some of the towers, so another number of workers would decide otherwise: "
    "use what all workers have, such as report.loss, or what towers.gather() returns",
    ROWS: "Each worker has only some of the slices of a loader's batch, so another number of workers would "
    "decide otherwise: use a DataLoader of all rows on each worker, or an Evaluation",
    CLOCK: "Each worker has a clock of its own, so workers would not decide alike: count steps instead, "
    "such as by towers.step",
}


def check_decisions(source: SourceCode) -> Set[ProgramLine]:
    """Warn of what the program on this thread's stack decides by what other workers may not have.

    These are the options of an optimizer or a schedule, the batch of a step, the number of towers, and how
    often a loop around the step runs; by a worker's own passes or its clock, also which weights are kept.

    Returns:
        The lines that warnings have named.
    """
    found = _found(source)
    if NUM_WORKERS in found:
        warn(
            f"computed from the number of workers: {_listed(found[NUM_WORKERS])}. Another number of workers "
            "would take different steps: use numbers that do not depend on it, such as the rows of the whole "
            "batch"
        )
    for place in sorted(OWN & found.keys()):
        warn(f"computed from {place.holder} alone: {_listed(found[place])}. {_REMEDIES[place]}")
    return {line for lines in found.values() for line in lines}


def check_outside_gradients(source: SourceCode, ids: Set[int], but: Set[ProgramLine]) -> None:
    """Warn of what is decided by gradients of tensors that no `Towers` averages, which passes have left.

    Args:
        source: where functions are found.
        ids: those of the tensors.
        but: the lines that other warnings have named.
    """
    found = _found(source, ids).get(PASSES, {})
    if others := {line: what for line, what in found.items() if line not in but}:
        warn(
            f"computed from gradients of this worker's passes alone: {_listed(others)}. They are of tensors "
            "that are not part of the model, so nobody averages them: pass them, or their module, as "
            "Towers(model, ..., also=...)"
        )


def _found(source: SourceCode, ids: Set[int] = frozenset()) -> Mapping[Place, dict[ProgramLine, str]]:
    frames = list(frames_of_program())
    loops = [loop for frame in frames for loop in source.loops_around(frame)]
    found: defaultdict[Place, dict[ProgramLine, str]] = defaultdict(dict)
    for frame in frames:
        for place, lines in _Decisions(source, loops, ids).find_in(frame).items():
            found[place].update(lines)
    return found


def _listed(found: Mapping[ProgramLine, str]) -> str:
    return "; ".join(f"{what} ({line})" for line, what in sorted(found.items()))


class _Decisions(PassResults):
    """What a function or a module that is running decides, from its beginning.

    Args:
        source: where functions are found.
        loops: those that are running.
        outside: the ids of tensors whose gradients are those of this worker's passes alone.
    """

    def __init__(
        self, source: SourceCode, loops: Sequence[ast.For | ast.While], outside: Set[int] = frozenset()
    ) -> None:
        super().__init__(source, loops)
        self._outside = outside
        self._objects: dict[Hashable, Any] = {}  # those that the code makes, by keys of their values
        self._decisions: dict[Place, dict[ProgramLine, str]] = {}  # by what, and by their lines
        self._repeats = False  # how often a loop runs is decided so
        self._line = 0  # of the current call

    def find_in(self, frame: FrameType) -> Mapping[Place, Mapping[ProgramLine, str]]:
        """Visit the code of a frame; return what it decides, by what, by line."""
        self._scope = Scope.of_frame(frame)
        self._run(self._source.body(frame.f_code))
        return self._decisions

    def _check(self, what: str, sources: frozenset[Place], line: int) -> bool:
        found = sources & {NUM_WORKERS, *OWN}
        for place in found:
            self._decisions.setdefault(place, {})[ProgramLine(self._scope.path, line)] = what
        return bool(found)

    # ---- gradients that nobody averages --------------------------------------------------------------

    def _attribute_value(self, holder: Value, name: str) -> Value:
        """Return an attribute's value; a gradient that nobody averages is computed from the passes."""
        value = super()._attribute_value(holder, name)
        if not self._outside:
            return value
        of = self._object_now(holder)
        if name == "grad" and id(of) in self._outside:
            return value.computed_from(frozenset({PASSES}))
        self._note_object(value, attribute_of(of, name))
        return value

    def visit_Compare(self, node: ast.Compare) -> Value:
        """Return what a comparison returns; whether there is a gradient is nothing that differs."""
        value = super().visit_Compare(node)
        match node:
            case ast.Compare(left=ast.Attribute(attr="grad"), comparators=[ast.Constant(value=None)]):
                return Value()
        return value

    def _parameter_of(self, module: Value, value: Value) -> Value:
        """Return one of a module's parameters, for all of them: one that nobody averages, if there is any."""
        found = self._object_now(module)
        held = found.parameters() if isinstance(found, nn.Module) else ()
        outside = next((each for each in held if id(each) in self._outside), None)
        return super()._parameter_of(module, value) if outside is None else Value.of(outside, module.name)

    def _object_now(self, value: Value) -> Any:
        """Return what object a value is; one that the code makes is what a variable holds now."""
        return self._objects.get(value.key) if isinstance(value.object, NewObject) else value.object

    def _note_object(self, value: Value, found: Any) -> None:
        is_found = found is not None and found is not UNKNOWN and found is not MISSING
        if self._outside and is_found and isinstance(value.object, NewObject):
            self._objects[value.key] = found

    # ---- calls ---------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Value:
        """Note the line."""
        outer, self._line = self._line, node.lineno
        value = super().visit_Call(node)
        self._line = outer
        self._check_call(node)
        return value

    def _check_call(self, node: ast.Call) -> None:
        """Check a seed, or what a call edits: a method of a tensor, or a function as `nn.init.constant_`."""
        given = [*node.args, *(each.value for each in node.keywords)]
        match node.func:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in _SEEDING:
                # Not the time, say: layers get worker 0's weights. Nor the number of a step in such a loop.
                counted = NOWHERE if self._repeats else frozenset({NUM_WORKERS})
                sources = NOWHERE.union(*(self._found.get(id(each), NOWHERE) for each in given))
                self._check("a seed", sources & counted, node.lineno)
                return
            case ast.Attribute(attr="requires_grad_") if not self._is_in_pass:
                self._check("what is trained", self._decided_by, node.lineno)
                return
            case ast.Attribute(value=of, attr=name) if is_in_place(name):
                is_method = not isinstance(self.visit(of).object, (ModuleType, type))
            case ast.Name(id=name) if is_in_place(name):
                is_method = False
            case _:
                return
        if is_method:
            self._check_edit(node, *given)
        elif name.startswith("_foreach_"):
            self._check("gradients or weights", self._edited_by(node, given), node.lineno)
        elif node.args:
            self._check_edit(node.args[0], *given, is_part=True)

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        if kind_of(called) is DataLoader or is_of_samestep(kind_of(called)):
            named = {name: value for name, value in named.items() if name not in _WITHOUT_EFFECT}
        is_edit = self._is_in_pass and changes_layers(called.object)  # an error of its own
        given = {} if is_edit else settings_of(called, arguments, named)
        # A layer in a pass may have the size of its rows.
        but = OWN if issubclass(kind_of(called), nn.Module) else NOWHERE
        name = called.object.__name__ if isinstance(called.object, FunctionType) else kind_of(called).__name__
        is_found = self._check_arguments(name, given, but)
        if self._decided_by and (name := name_of_change(called, arguments)):
            self._check(f"whether {name} runs", self._decided_by, self._line)
        if is_found:
            return self._new(kind_of(called), NOWHERE)
        returned = super()._call_object(called, arguments, named)
        given = {**{f"argument {number}": each for number, each in enumerate(arguments)}, **named}
        if returned is None and any(issubclass(kind_of(each), Optimizer) for each in given.values()):
            self._check_arguments(called.name, given, but=OWN)  # a library makes a schedule
        return returned

    def _check_arguments(
        self, name: str, given: Mapping[str, Value], but: frozenset[Place] = NOWHERE
    ) -> bool:
        return any(
            self._check(
                f"{argument or 'arguments'} of {name}",
                self._all_in(value) - but - _LEFT_OUT.get(argument, NOWHERE),
                self._line,
            )
            for argument, value in given.items()
            if not (self._repeats and argument == "batch")  # it is from that loop
        )

    def _set(self, target: ast.expr, value: Value) -> None:
        name = self.visit(target.slice).text if isinstance(target, ast.Subscript) else ""
        if name in _OPTIONS:
            # In a pass, that is an error of its own.
            sources = self._values.data_of(value) - (OWN if self._is_in_pass else NOWHERE) | self._decided_by
            self._check(_OPTIONS[name], sources, target.lineno)
        super()._set(target, value)
        if isinstance(target, ast.Name) and not self._running:
            self._note_object(value, self._scope.objects.get(target.id))

    def _change(self, call: MethodCall) -> None:
        for name, value in () if self._is_in_pass else self._options_in(call):
            self._check(_OPTIONS[name], self._decided_by | self._values.data_of(value), self._line)
        super()._change(call)

    def _options_in(self, call: MethodCall) -> Iterator[tuple[str, Value]]:
        """Yield the options of an optimizer that a method sets in a group of parameters, or in a new one."""
        match call:
            case MethodCall(method="update" | "add_param_group"):
                for given in (call.named, *map(self._values.named_in, call.arguments)):
                    yield from ((name, given[name]) for name in _OPTIONS if name in given)
            case MethodCall(method="__setitem__" | "setdefault", arguments=[Value(object=str(name)), value]):
                if name in _OPTIONS:
                    yield name, value

    def _note_loss(self, sources: frozenset[Place]) -> None:
        if LEFT in sources:
            self._check("the loss of later passes", frozenset({PASSES}), self._line)

    def _note_whole_loss(self, sources: frozenset[Place]) -> None:
        self._check("the loss of the whole batch", sources, self._line)

    # ---- weights -------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Check parts and attributes on the left."""
        super().visit_Assign(node)
        for target in node.targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                self._check_edit(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Check what is on the left."""
        super().visit_AugAssign(node)
        self._check_edit(node.target, node.value)

    def _check_edit(self, target: ast.expr, *given: ast.expr, is_part: bool = False) -> None:
        """Check what code outside of passes has edited, if that is a weight or a gradient.

        `is_part` is whether it is edited in place, and not an attribute that is set to something else.
        """
        sources = self._edited_by(target, given)
        if not sources:
            return
        edited = edited_by(target)
        name = ""
        holder: type = object
        if isinstance(edited, ast.Attribute):
            name, holder = edited.attr, kind_of(self.visit(edited.value))
        is_part |= edited is not target
        if name == "grad":
            self._check("a gradient", sources, target.lineno)
        elif name == "requires_grad":
            self._check("what is trained", sources, target.lineno)
        elif (is_part and name in _WEIGHTS) or issubclass(kind_of(self.visit(edited)), nn.Parameter):
            self._check("a weight", sources, target.lineno)
        elif is_setting(holder, name):
            self._check(f"a setting of {holder.__name__}", sources, target.lineno)

    def _edited_by(self, target: ast.expr, given: Iterable[ast.expr]) -> frozenset[Place]:
        """Return the numbers of its own by which a worker edits a tensor outside of passes."""
        if self._is_in_pass:  # where an edit is an error of its own
            return NOWHERE
        indices = [each.slice for each in ast.walk(target) if isinstance(each, ast.Subscript)]
        found = [self._found.get(id(each), NOWHERE) for each in (*given, *indices)]
        return self._decided_by.union(*found) & {NUM_WORKERS, *OWN}

    # ---- loops ---------------------------------------------------------------------------------------

    def visit_While(self, node: ast.If | ast.While) -> None:
        """Check how often it runs."""
        super().visit_While(node)
        if node in self._loops:
            sources = self._counted_in(node.test) | self._data(node.test)
            self._repeats |= self._check("the loop over steps", sources, node.lineno)

    def _note_batches(self, sources: frozenset[Place]) -> None:
        self._check(_BATCHES, sources, self._line)

    def _note_taken(self, loop: ast.For, sources: frozenset[Place]) -> None:
        if loop in self._loops and not (self._repeats or self._is_in_pass):  # not the loops in it
            what = _BATCHES if is_loader(self.visit(loop.iter)) else "the loop over steps"
            self._repeats |= self._check(what, sources, loop.lineno)
        super()._note_taken(loop, sources)

    def visit_Break(self, node: ast.Break) -> None:
        """Check whether it ends a loop over steps."""
        self._check_end(node, self._around[-1:])

    def visit_Return(self, node: ast.Return) -> None:
        """Check whether it ends loops over steps."""
        self._check_end(node, self._around)
        super().visit_Return(node)

    def _check_end(self, node: ast.stmt, ended: Sequence[ast.stmt]) -> None:
        if self._decided_by and any(loop in self._loops for loop in ended):
            self._check("the end of the loop over steps", self._decided_by, node.lineno)
