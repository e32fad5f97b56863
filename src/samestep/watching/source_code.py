"""Finds the source code of what runs in a pass; there is none for what was typed into an interpreter."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import TypeAlias, TypeGuard

from samestep.watching.name_uses import Body, deciding_names, names_read
from samestep.watching.program_line import Expression, ProgramLine

__all__ = ["SourceCode"]

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = ("site-packages", "dist-packages")  # also those of the user or the system


class SourceCode:
    """The code of a program, without libraries, while a pass runs.

    Args:
        running: the lines that are running.
    """

    def __init__(self, running: Sequence[ProgramLine]) -> None:
        self._trees: dict[str, ast.Module] = {}
        self._loops = [body for line in running for body in self._loops_in(line)]
        # These have the loop over towers, or call what has it.
        self._once = {id(node) for line in running for node in self._around(line) if _is_function(node)}

    def of_passes(self, functions: Iterable[CodeType]) -> list[Body]:
        """Return the code that runs in each pass, which may call `functions`."""
        found = map(self._function, functions)
        return [
            *self._loops,
            *(_body_of(each) for each in found if each is not None and id(each) not in self._once),
        ]

    def names_in(self, expression: Expression) -> set[str]:
        """Return the names that an expression reads, and those that decide whether it runs."""
        place, nodes = expression.place(), list(ast.walk(self._tree(expression.code.co_filename)))
        found = [node for node in nodes if isinstance(node, ast.expr) and _place_of(node) == place]
        choices = (node for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.While)))
        around = [each for each in choices if any(_is_within(node, each) for node in found)]
        return set[str]().union(*map(names_read, found), *map(deciding_names, around))

    def _loops_in(self, line: ProgramLine) -> Iterator[Body]:
        for node in self._around(line):
            if isinstance(node, ast.For) and line.number <= (node.iter.end_lineno or 0):
                yield [_set([node.target]), *node.body]

    def _function(self, code: CodeType) -> _Function | None:
        nodes = filter(_is_function, ast.walk(self._tree(code.co_filename)))
        return next((node for node in nodes if _first_line(node) == code.co_firstlineno), None)

    def _around(self, line: ProgramLine) -> list[ast.stmt]:
        """Return the statements that a line is in, from the outermost one to the innermost one."""
        statements = (node for node in ast.walk(self._tree(line.path)) if isinstance(node, ast.stmt))
        return [each for each in statements if each.lineno <= line.number <= (each.end_lineno or 0)]

    def _tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            text = "" if _is_of_library(path) else "".join(linecache.getlines(path))
            try:
                self._trees[path] = ast.parse(text)
            except (SyntaxError, ValueError):  # not in Python
                self._trees[path] = ast.parse("")
        return self._trees[path]


def _is_of_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or any(name in path for name in _PACKAGES)


def _place_of(node: ast.expr) -> tuple[int, int | None, int, int | None]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _is_within(node: ast.expr, other: ast.stmt | ast.expr) -> bool:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    is_after = (other.lineno, other.col_offset) <= begin
    return is_after and end <= (other.end_lineno or 0, other.end_col_offset or 0)


def _is_function(node: ast.AST) -> TypeGuard[_Function]:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _first_line(function: _Function) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _body_of(function: _Function) -> Body:
    """Return the body, after a statement that sets the function's own variables."""
    nodes = list(ast.walk(function))
    shared = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [_set([node for node in names if node.id not in shared]), *function.body]


def _set(targets: Sequence[ast.expr]) -> ast.Assign:
    return ast.Assign(list(targets), ast.Constant(None))
