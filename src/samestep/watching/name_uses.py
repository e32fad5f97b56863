"""How statements use names, as their source says: which they carry on from pass to pass, as a running mean.

Code carries a name on if it reads it before it sets it, and then computes the new value from the old one or
may keep that, or if a call such as `append` changes its object.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

__all__ = ["Body", "carried_sources", "deciding_names", "names_read", "plain_name"]

Body: TypeAlias = Sequence[ast.stmt]
"""Statements that run one after the other."""

_ELSEWHERE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CHANGING = {"add", "append", "appendleft", "extend", "insert", "update"}


def carried_sources(names: Iterable[str], bodies: Iterable[Body]) -> set[str]:
    """Return those of `names`, and of what code computes these from, that the code carries on.

    Args:
        names: as from `plain_name`.
        bodies: the code.
    """
    return set[str]().union(*(_sources_in(body, names) for body in bodies))


def names_read(expression: ast.AST) -> set[str]:
    """Return the names that an expression reads, except of objects that it changes by a call."""
    uses = _Uses()
    uses.visit(expression)
    return uses.read


def deciding_names(choice: ast.If | ast.IfExp | ast.While) -> set[str]:
    """Return the names that a choice reads, except those that it sets, such as a cache that it fills."""
    uses = _Uses()
    for statement in [] if isinstance(choice, ast.IfExp) else choice.body:
        uses.visit(statement)
    return names_read(choice.test) - uses.all_set


def plain_name(name: str) -> str:
    """Return the name of a variable or attribute, or that of the list or array in which an entry is.

    >>> [plain_name(each) for each in ("mean", "mean of self", "means[0] of self", "settings.mean")]
    ['mean', 'mean of self', 'means of self', 'mean of settings']
    """
    return re.sub(r"(\w+)\.(\w+)", r"\2 of \1", re.sub(r"\[[^\]]*\]", "", name))


def _sources_in(body: Body, names: Iterable[str]) -> set[str]:
    uses = _Uses()
    for statement in body:
        uses.visit(statement)
    found = set(names).union(*map(uses.sources_of, names))
    return {each for each in found if uses.carries_on(each)}


class _Uses(ast.NodeVisitor):
    """Visits statements in the order in which they run, and notes how they use names.

    Attributes:
        read: names that the current statement reads.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._sources: dict[str, set[str]] = defaultdict(set)  # of each name that is set, those in its value
        self._read_first: set[str] = set()
        self._surely_set: set[str] = set()  # whichever branches have run
        self._changed: set[str] = set()  # of objects that calls change
        self._filled: set[str] = set()  # of containers of which an entry is set, perhaps one that is new

    @property
    def all_set(self) -> set[str]:
        """The names that any of the statements sets."""
        return set(self._sources)

    def carries_on(self, name: str) -> bool:
        """Say whether a name is read before it is set, to its old value or to what is computed from that.

        Or whether a call such as `append` changes its object.
        """
        may_stay = name in self._sources and name not in self._surely_set | self._filled
        is_new = not (may_stay or name in self.sources_of(name) or name in self._changed)
        return name in self._read_first and not is_new

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
            changed = _name_of(node.func.value)
            self._changed.add(changed)
            self.read.discard(changed)

    def visit_If(self, node: ast.If) -> None:
        """Visit both branches."""
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """Visit the body as one that may not run."""
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        """Visit the body as one that runs, as nearly all do."""
        self._visit_set(node.iter, [node.target])
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def _visit_branches(self, *branches: Body) -> None:
        """Visit statements of which only one sequence runs."""
        before, found = self._surely_set, []
        for branch in branches:
            self._surely_set = set(before)
            for statement in branch:
                self.visit(statement)
            found.append(self._surely_set)
        self._surely_set = set.intersection(*found)

    def _visit_set(self, value: ast.expr, targets: Iterable[ast.expr]) -> None:
        before, self.read = self.read, set()
        self.visit(value)
        sources = set(self.read)
        for target in targets:
            self.visit(target)
            for each in ast.walk(target):
                if isinstance(getattr(each, "ctx", None), ast.Store):
                    name = _name_of(each)
                    self._note_set(name, sources)
                    if isinstance(each, ast.Subscript) and name == _name_of(each.value):
                        self._filled.add(name)
        self.read |= before

    def _note_read(self, name: str) -> None:
        self.read.add(name)
        holders = accumulate(reversed(name.split(" of ")), lambda holder, part: f"{part} of {holder}")
        if self._surely_set.isdisjoint(holders):
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
