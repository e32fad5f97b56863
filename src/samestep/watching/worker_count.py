"""Finds what a program computes from the number of workers: a learning rate, a batch size, a number of steps.

All workers compute the same, so comparing them shows nothing. The program's source code does.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.errors import warn
from samestep.watching.program.calls import NOWHERE, positional_names
from samestep.watching.program.code_values import (
    LocalFunction,
    Method,
    NewObject,
    Place,
    Scope,
    Value,
    attribute_of,
    is_of_samestep,
)
from samestep.watching.program.program_line import ProgramLine, frames_of_program
from samestep.watching.program.source_code import SourceCode
from samestep.watching.program.syntax import constant_name
from samestep.watching.program.worker_values import NUM_WORKERS, WorkerValues

__all__ = ["check_worker_count"]

_WITHOUT_EFFECT = ("num_workers", "prefetch_factor")
"""Parameters of loaders on which no result depends."""

_ARGUMENTS = ("batch", "batch_size", "clip_norm", "num_towers", "seed", "steps")
"""Parameters of samestep's classes on which the result depends."""


def check_worker_count(source: SourceCode) -> None:
    """Warn of what the program on this thread's stack computes from the number of workers.

    These are the options of an optimizer or a schedule, the batch of a step, the number of towers, and how
    often a loop around the step runs.
    """
    frames = list(frames_of_program())
    loops = [loop for frame in frames for loop in source.loops_around(frame)]
    found: dict[ProgramLine, str] = {}
    for frame in frames:
        found.update(_WorkerCountFlow(source, loops).find_in(frame))
    if found:
        listed = "; ".join(f"{what} ({line})" for line, what in sorted(found.items()))
        warn(
            f"computed from the number of workers: {listed}. Another number of workers would take different "
            "steps: use numbers that do not depend on it, such as the rows of the whole batch"
        )


class _WorkerCountFlow(WorkerValues):
    """The values of a function or a module that is running, from its beginning.

    Args:
        source: where functions are found.
        loops: those that are running.
    """

    def __init__(self, source: SourceCode, loops: Sequence[ast.For | ast.While]) -> None:
        super().__init__(source)
        self._loops = loops
        self._counted: dict[ProgramLine, str] = {}  # what is computed from the number of workers, by its line
        self._repeats = False  # how often a loop runs is computed from it
        self._path = ""
        self._line = 0  # of the current call

    def find_in(self, frame: FrameType) -> Mapping[ProgramLine, str]:
        """Visit the code of a frame; return what it computes from the number of workers, by line."""
        self._scope, self._path = Scope.of_frame(frame), frame.f_code.co_filename
        self._run(self._source.body(frame.f_code))
        return self._counted

    def _check(self, what: str, sources: frozenset[Place], line: int) -> bool:
        if NUM_WORKERS in sources:
            self._counted.setdefault(ProgramLine(self._path, line), what)
        return NUM_WORKERS in sources

    def visit_Call(self, node: ast.Call) -> Value:
        """Note the line."""
        outer, self._line = self._line, node.lineno
        value = super().visit_Call(node)
        self._line = outer
        return value

    def _call_function(
        self, function: Any, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        outer = self._path
        if isinstance(function, FunctionType):
            self._path = function.__code__.co_filename
        value = super()._call_function(function, arguments, named)
        self._path = outer
        return value

    def _call_object(
        self, called: Value, arguments: Sequence[Value], named: Mapping[str, Value]
    ) -> Value | None:
        if _kind(called) is DataLoader or is_of_samestep(_kind(called)):
            named = {name: value for name, value in named.items() if name not in _WITHOUT_EFFECT}
        if self._check_arguments(_kind(called).__name__, _deciding(called, arguments, named)):
            return self._new(_kind(called), NOWHERE)
        returned = super()._call_object(called, arguments, named)
        given = {**{f"argument {number}": each for number, each in enumerate(arguments)}, **named}
        if returned is None and any(issubclass(_kind(each), Optimizer) for each in given.values()):
            self._check_arguments(called.name, given)  # a library makes a schedule
        return returned

    def _check_arguments(self, name: str, given: Mapping[str, Value]) -> bool:
        return any(
            self._check(f"{argument or 'arguments'} of {name}", self._all_in(value), self._line)
            for argument, value in given.items()
            if not (self._repeats and argument == "batch")  # it is from that loop
        )

    def _set(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Subscript) and constant_name(target.slice) == "lr":
            self._check("a learning rate", self._values.data_of(value), target.lineno)
        super()._set(target, value)

    def visit_While(self, node: ast.If | ast.While) -> None:
        """Check how often it runs."""
        if node in self._loops:
            compared = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
            sources = NOWHERE.union(*(self.generic_visit(each).sources for each in compared))
            self._repeats |= self._check("the loop over steps", sources, node.lineno)
        super().visit_While(node)

    def _note_taken(self, loop: ast.For, sources: frozenset[Place]) -> None:
        if loop in self._loops and not self._repeats:  # not the loops in it
            self._repeats |= self._check("the loop over steps", sources, loop.lineno)
        super()._note_taken(loop, sources)


def _kind(value: Value) -> type:
    """Return the class that a value is, or of which it is; that of a method's object."""
    match value.object:
        case Method(of=holder):
            return _kind(holder)
        case NewObject(kind=kind):
            return kind or object
        case LocalFunction():
            return FunctionType
        case type() as kind:
            return kind
    return type(value.object)


def _deciding(called: Value, arguments: Sequence[Value], named: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return the arguments on which the result depends, by name, of what torch and samestep define."""
    kind, is_new = _kind(called), isinstance(called.object, type)
    is_of_torch = is_new and issubclass(kind, (Optimizer, LRScheduler))
    if not (is_of_torch or is_of_samestep(kind)):
        return {}
    method = called.object.function if isinstance(called.object, Method) else None
    function = method or attribute_of(kind, "__init__" if is_new else "__call__")
    names = positional_names(function)[1:]
    given = {**dict(zip(names, arguments, strict=False)), **named}
    return given if is_of_torch else {name: value for name, value in given.items() if name in _ARGUMENTS}
