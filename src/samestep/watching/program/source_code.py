"""Finds the source code of what runs in a pass; there is none for what was typed into an interpreter."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from samestep.watching.program.program_line import Expression

__all__ = ["LEAVING", "Computed", "Function", "SourceCode", "parse"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Computed: TypeAlias = ast.expr | ast.AugAssign | ast.For
"""What operators run for; for a loop, where it takes its next element."""

_IsWanted: TypeAlias = Callable[[ast.AST], bool]

LEAVING = (ast.Return, ast.Continue, ast.Break)
"""Statements after which those that follow do not run."""

_MOST_NESTED = 8
"""How many branches, each of which may leave what follows, are nested in each other."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = ("site-packages", "dist-packages")  # also those of the user or the system
_OURS = str(Path(__file__).parents[2])


class SourceCode:
    """The code of a program, without libraries."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._finders: dict[_IsWanted, _Finder] = {}

    def loop_in(self, frame: FrameType, *, has_called_next: bool = False) -> ast.For | ast.While | None:
        """Return the loop that takes its next element in a frame.

        `has_called_next` says that the frame has called `next`, or the like, perhaps in the loop's body.
        """
        around, line = self.loops_around(frame), frame.f_lineno
        taking = [e for e in around if isinstance(e, ast.For) and line <= (e.iter.end_lineno or 0)]
        if taking:
            return taking[0]
        innermost = around[-1] if around and has_called_next else None
        return None if innermost is None or _takes_average(innermost) else innermost

    def loops_around(self, frame: FrameType) -> list[ast.For | ast.While]:
        """Return the loops around the line that runs in a frame, from outer to inner ones."""
        nodes = (node for statement in self.body(frame.f_code) for node in ast.walk(statement))
        loops, line = [each for each in nodes if isinstance(each, (ast.For, ast.While))], frame.f_lineno
        return [each for each in loops if each.lineno <= line <= (each.end_lineno or 0)]

    def body(self, code: CodeType) -> Sequence[ast.stmt]:
        """Return the statements of a function or a module."""
        if code.co_name == "<module>":
            return self._file(code).tree.body
        found = self.function(code)
        return [] if found is None or isinstance(found, ast.Lambda) else found.body

    def function(self, code: CodeType) -> Function | None:
        """Return the function that has this code; None for one of several lambdas in a line."""
        functions = self._file(code).functions.get((code.co_name, code.co_firstlineno), ())
        return functions[0] if len(functions) == 1 else None

    def all_at(self, expression: Expression) -> list[Computed]:
        """Return what an expression is in the code, if known."""
        return list(self._file(expression.code).computed.get(expression.place(), ()))

    def find(self, is_wanted: _IsWanted, nodes: Iterable[ast.AST]) -> list[ast.AST]:
        """Return the wanted nodes that these are, or have in them."""
        if is_wanted not in self._finders:
            self._finders[is_wanted] = _Finder(is_wanted)
        return self._finders[is_wanted].find(nodes)

    def _file(self, code: CodeType) -> _File:
        path = code.co_filename
        if path not in self._files:
            self._files[path] = _parsed("" if _is_of_library(path) else "".join(linecache.getlines(path)))
        return self._files[path]


class _Finder:
    """Finds nodes of a kind. It looks at each function and each `if` once: these may be nested deeply."""

    def __init__(self, is_wanted: _IsWanted) -> None:
        self._is_wanted = is_wanted
        self._known: dict[ast.AST, list[ast.AST]] = {}

    def find(self, nodes: Iterable[ast.AST]) -> list[ast.AST]:
        """Return the nodes of this kind that these are, or have in them."""
        found, left = [], deque(nodes)
        while left:
            node = left.popleft()
            if isinstance(node, (ast.If, Function)):
                if node not in self._known:
                    self._known[node] = self.find(ast.iter_child_nodes(node))
                found += self._known[node]
                continue
            if self._is_wanted(node):
                found.append(node)
            left.extend(ast.iter_child_nodes(node))
        return found


class _File:
    """The source code of a file.

    Attributes:
        tree: all of it; empty if it is not in Python, or nested too deeply.
    """

    def __init__(self, text: str) -> None:
        try:
            self.tree = parse(text)
        except (SyntaxError, ValueError, RecursionError):
            self.tree = ast.parse("")

    @cached_property
    def functions(self) -> Mapping[tuple[str, int], Sequence[Function]]:
        """The functions, by their names and first lines, as their code has them."""
        found = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                found[_place(node)].append(node)
        return found

    @cached_property
    def computed(self) -> Mapping[Any, Sequence[Computed]]:
        """What operators run for, by first and last line, and first and last column."""
        found = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(node, Computed):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                found[place].append(node)
        return found


@lru_cache(maxsize=16)
def _parsed(text: str) -> _File:
    """Return a file with this text: a program's files are read more than once."""
    return _File(text)


def parse(text: str) -> ast.Module:
    """Parse code; what follows a branch that leaves a function or a turn of a loop is in the other branch.

    Raises:
        SyntaxError, ValueError, RecursionError: as for `ast.parse`.
    """
    tree = ast.parse(text)
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                _nest_rest(statements)
    return tree


def _nest_rest(statements: list[ast.stmt]) -> None:
    """Move the statements after a branch that leaves them into the other one, for the last few branches."""
    branches = [(number, _other_branch(each)) for number, each in enumerate(statements[:-1], start=1)]
    leaving = [(number, others) for number, others in branches if others is not None]
    for number, others in reversed(leaving[-_MOST_NESTED:]):
        others.extend(statements[number:])
        del statements[number:]


def _other_branch(statement: ast.stmt) -> list[ast.stmt] | None:
    """Return what a statement runs if it does not leave those that follow; None if it never leaves them."""
    match statement:
        case ast.If(body=[*_, last], orelse=others) if isinstance(last, LEAVING):
            return others
        case ast.If(body=others, orelse=[*_, last]) if isinstance(last, LEAVING):
            return others
    return None


def _is_of_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _OURS)) or any(name in path for name in _PACKAGES)


def _takes_average(loop: ast.AST) -> bool:
    """Say whether a loop's body ends a step, so that it is one over steps."""
    return any(isinstance(each, ast.Attribute) and each.attr == "average" for each in ast.walk(loop))


def _place(function: Function) -> tuple[str, int]:
    """Return a function's name and first line, as its code has them."""
    if isinstance(function, ast.Lambda):
        return "<lambda>", function.lineno
    return function.name, min([function.lineno, *(each.lineno for each in function.decorator_list)])
