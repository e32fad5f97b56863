"""What the forms of expressions and statements say, whatever their values are."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from samestep.watching.program.source_code import Function

__all__ = [
    "OPERATORS",
    "OVERWRITING",
    "branch_without_value",
    "computes_from_itself",
    "constant_number",
    "edited_by",
    "ends_program",
    "has_number",
    "is_backward",
    "is_collective",
    "is_in_place",
    "is_unpacked",
    "is_whole",
    "loaded",
    "names_in",
    "own_names",
    "parallel_names",
    "sets_place",
]

_COLLECTIVES = {"all_gather", "all_gather_object", "all_reduce", "broadcast", "broadcast_object_list"}
_DRAWING = {"bernoulli_", "exponential_", "normal_", "random_", "uniform_"}
_ENDS = {"_exit", "abort", "exit"}

OVERWRITING = {"copy_", "fill_", "set_", "zero_", *_DRAWING}
"""Methods of tensors that leave nothing of their values."""

OPERATORS: Mapping[type[ast.operator | ast.cmpop], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
"""The names of the methods, without underscores, by which a class defines operators."""


def branch_without_value(choice: ast.If | ast.While) -> list[ast.stmt] | None:
    """Return what runs where something has no value yet, or that of something else, as for a cache.

    None if that is not what is asked for.
    """
    if (has_value := _has_value(choice.test)) is None:
        return None
    return choice.orelse if has_value else choice.body


def _has_value(test: ast.expr) -> bool | None:
    """Say what it means that a test is true; None if it asks for something else."""
    match test:
        case ast.UnaryOp(op=ast.Not()) | ast.Compare(ops=[ast.NotIn() | ast.NotEq()]):
            return False
        case ast.Compare(ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(None)]):
            return False
        case ast.Compare(ops=[ast.In() | ast.Eq() | ast.IsNot()]) | ast.Name() | ast.Attribute():
            return True
        case ast.Call(func=ast.Name(id="hasattr")):
            return True
        case ast.BoolOp(values=[first, *_]):
            return _has_value(first)
    return None


def sets_place(node: ast.AST) -> bool:
    """Say whether a node sets a variable, an attribute or an entry."""
    match node:
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
            return True
        case ast.Call(func=ast.Name(id="setattr"), args=[_, _, _]):
            return True
    return False


def is_unpacked(argument: ast.AST) -> bool:
    """Say whether it is `*values` or `**values`."""
    return isinstance(argument, ast.Starred) or (isinstance(argument, ast.keyword) and argument.arg is None)


def is_whole(index: ast.expr) -> bool:
    """Say whether an index selects all entries."""
    if isinstance(index, ast.Slice):
        return index.lower is None and index.upper is None and index.step is None
    return isinstance(index, ast.Constant) and index.value is Ellipsis


def is_in_place(method: str) -> bool:
    """Say whether a method of tensors changes them, by its name."""
    return method.endswith("_") and not method.endswith("__")


def computes_from_itself(assignment: ast.Assign) -> bool:
    """Say whether an assignment sets something by an operator that takes it, as `n = n + 1` does."""
    targets = {ast.unparse(each) for each in assignment.targets}
    parts = ast.walk(assignment.value) if isinstance(assignment.value, ast.BinOp) else ()
    return any(isinstance(each, ast.expr) and ast.unparse(each) in targets for each in parts)


def edited_by(target: ast.expr) -> ast.expr:
    """Return what an expression is a part or a view of, such as `p` of `p.data[0]` and `p.mul_(2)`."""
    match target:
        case ast.Subscript(value=of) | ast.Attribute(value=of, attr="data"):
            return edited_by(of)
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if is_in_place(name):
            return edited_by(of)
    return target


def constant_number(index: ast.expr) -> int | None:
    """Return the number of an entry, if it is constant."""
    try:
        found = ast.literal_eval(index)
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def has_number(*expressions: ast.expr) -> bool:
    """Say whether a number is written out in one of these, and none of them calls anything."""
    nodes = [node for each in expressions for node in ast.walk(each)]
    numbers = (each.value for each in nodes if isinstance(each, ast.Constant))
    return any(type(each) in (int, float) for each in numbers) and not any(
        isinstance(each, ast.Call) for each in nodes
    )


def loaded(target: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    """Return an expression that reads what a statement sets."""
    return ast.copy_location(type(target)(**{**vars(target), "ctx": ast.Load()}), target)


def names_in(expressions: Iterable[ast.expr]) -> frozenset[str]:
    """Return the names of variables in expressions."""
    nodes = (node for each in expressions for node in ast.walk(each))
    return frozenset(each.id for each in nodes if isinstance(each, ast.Name))


def own_names(function: Function) -> frozenset[str]:
    """Return the names of a function's own variables."""
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    nodes = [each for part in body for each in ast.walk(part)]
    outer = {name for each in nodes if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names}
    stored = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return frozenset(names | stored - outer)


def parallel_names(loop: ast.For) -> list[str]:
    """Return the variables of a loop over several things at once, by `enumerate` or `zip`."""
    match loop.iter:
        case ast.Call(func=ast.Name(id="enumerate" | "zip")):
            return [each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)]
    return []


def is_backward(called: ast.expr) -> bool:
    """Say whether what is called is a method of a tower, or a tensor, that runs backward."""
    return isinstance(called, ast.Attribute) and called.attr in ("backward", "backward_sum")


def is_collective(node: ast.AST) -> bool:
    """Say whether a call is one of torch's collectives, or of a library's function that has its name."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in _COLLECTIVES
    return False


def ends_program(statement: ast.stmt) -> bool:
    """Say whether a statement raises an error, or ends the process."""
    match statement:
        case ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            return name in _ENDS
    return False
