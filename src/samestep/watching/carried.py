"""Finds what a program's code computes a number from, and carries on from pass to pass: a running mean.

Code carries a variable on if it reads it before it sets it, and then computes the new value from the old one
or may keep that. This reads source code, because objects do not tell; where there is none, as for what was
typed into an interpreter, it finds nothing.
"""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType

from samestep.watching.program_line import ProgramLine

__all__ = ["carried_sources", "plain_name"]

_Body = Sequence[ast.stmt]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ELSEWHERE = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)
_CHANGING = {"add", "append", "appendleft", "extend", "insert", "update"}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def carried_sources(name: str, lines: Iterable[ProgramLine], functions: Iterable[CodeType]) -> set[str]:
    """Return what code computes a variable, attribute or entry from, and carries on.

    Args:
        name: as from `plain_name`.
        lines: those that are running: the loops in them count.
        functions: the code of others that count.

    Returns:
        names of the same form; perhaps its own.
    """
    loops = (body for path, number in lines for body in _loops_in(_tree(path), number))
    return set[str]().union(*(_sources_in(body, name) for body in (*loops, *_bodies_of(functions))))


def plain_name(name: str) -> str:
    """Return the name of a variable or attribute, or that of the list or array in which an entry is.

    >>> [plain_name(each) for each in ("mean", "mean of self", "means[0] of self", "settings.mean")]
    ['mean', 'mean of self', 'means of self', 'mean of settings']
    """
    return re.sub(r"(\w+)\.(\w+)", r"\2 of \1", re.sub(r"\[[^\]]*\]", "", name))


def _tree(path: str) -> ast.Module:
    try:
        return ast.parse("" if path.startswith(_LIBRARIES) else "".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):  # not in Python
        return ast.parse("")


def _loops_in(tree: ast.Module, number: int) -> Iterator[_Body]:
    """Yield the bodies of loops that begin in a line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= number <= (node.iter.end_lineno or number):
            yield [ast.Assign([node.target], ast.Constant(None)), *node.body]


def _bodies_of(functions: Iterable[CodeType]) -> Iterator[_Body]:
    numbers = defaultdict[str, set[int]](set)
    for code in functions:
        numbers[code.co_filename].add(code.co_firstlineno)
    for path in numbers:
        for node in ast.walk(_tree(path)):
            if isinstance(node, _FUNCTIONS) and _first_line(node) in numbers[path]:
                yield node.body


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _sources_in(body: _Body, name: str) -> set[str]:
    """Return what these statements compute `name` from, and carry on; perhaps `name` itself."""
    uses = _Uses()
    for statement in body:
        uses.visit(statement)
    found = {each for each in uses.sources_of(name) if uses.carries_on(each) or uses.changes(each)}
    return found | ({name} if uses.carries_on(name) else set())


class _Uses(ast.NodeVisitor):
    """Visits statements in the order in which they run, and notes how they use names."""

    def __init__(self) -> None:
        self._sources: dict[str, set[str]] = defaultdict(set)  # of each name that is set, those in its value
        self._read_first: set[str] = set()
        self._surely_set: set[str] = set()  # whichever branches have run
        self._changed: set[str] = set()  # of objects that calls change
        self._read: set[str] = set()  # in the current statement

    def carries_on(self, name: str) -> bool:
        """Say whether a name is read before it is set, to its old value or to what is computed from that."""
        is_new = name in self._surely_set and name not in self.sources_of(name)
        return name in self._sources and name in self._read_first and not is_new

    def changes(self, name: str) -> bool:
        """Say whether a call such as `append` changes an object that these statements have not made."""
        return name in self._changed and name in self._read_first

    def sources_of(self, name: str) -> set[str]:
        """Return what the value of a name is computed from, in one or several statements."""
        found, open_ = set[str](), set(self._sources.get(name, ()))
        while open_:
            found |= open_
            open_ = set[str]().union(*(self._sources.get(each, ()) for each in open_)) - found
        return found

    def visit(self, node: ast.AST) -> None:
        """Visit a statement or expression, but not the bodies of functions, which run elsewhere."""
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            self.generic_visit(node)
            if isinstance(node.ctx, ast.Load):
                self._note_read(_name_of(node))
        elif not isinstance(node, _ELSEWHERE):
            super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value first."""
        self._visit_set(node.value, node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Read the target as well."""
        name = _name_of(node.target)
        self._note_read(name)
        self._visit_set(node.value, [node.target])
        self._note_set(name, {name})

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value first, if there is one."""
        if node.value is not None:
            self._visit_set(node.value, [node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Visit the value first."""
        self._visit_set(node.value, [node.target])

    def visit_Call(self, node: ast.Call) -> None:
        """Note an object that a call such as `append` changes."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            self._changed.add(_name_of(node.func.value))

    def visit_If(self, node: ast.If) -> None:
        """Visit both branches."""
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """Visit the body as one that may not run."""
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        """Visit the body as one that may not run."""
        self._visit_set(node.iter, [node.target])
        self._visit_branches(node.body, node.orelse)

    def _visit_branches(self, *branches: _Body) -> None:
        """Visit statements of which only one sequence runs."""
        before, found = self._surely_set, []
        for branch in branches:
            self._surely_set = set(before)
            for statement in branch:
                self.visit(statement)
            found.append(self._surely_set)
        self._surely_set = set.intersection(*found)

    def _visit_set(self, value: ast.expr, targets: Iterable[ast.expr]) -> None:
        before, self._read = self._read, set()
        self.visit(value)
        sources = self._read
        for target in targets:
            self.visit(target)
            for each in ast.walk(target):
                if isinstance(getattr(each, "ctx", None), ast.Store):
                    self._note_set(_name_of(each), sources)
        self._read |= before

    def _note_read(self, name: str) -> None:
        self._read.add(name)
        if name not in self._surely_set:
            self._read_first.add(name)

    def _note_set(self, name: str, sources: set[str]) -> None:
        self._sources[name] |= sources
        self._surely_set.add(name)


def _name_of(node: ast.AST) -> str:
    """Return the name that `in_reach` has for an expression: "mean of self" for `self.mean`; or ""."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=of, attr=name) | ast.Subscript(value=of, slice=ast.Constant(str(name))):
            return f"{name} of {_name_of(of)}"
        case ast.Subscript(value=of):
            return _name_of(of)
    return ""
