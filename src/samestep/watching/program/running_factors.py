"""Says whether the expression that is running multiplies by a count, such as a number of rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from samestep.watching.program.program_line import Expression, frames_of_program
from samestep.watching.program.reach import locals_of

__all__ = ["LEAST_COUNT", "divides_by_variable", "multiplies_by_count", "multiplies_by_size"]

LEAST_COUNT = 2

_SIZES = {"rows", "shape", "size", "numel"}  # of tensors and towers


def multiplies_by_size(*sizes: int) -> bool:
    """Say whether a factor of it is `len(...)`, a size of a tensor or tower, or a variable equal to these."""
    factors = _running_factors()
    return any(map(_is_size, factors)) or any(
        isinstance(each, int) and each in sizes for each in _variables(factors)
    )


def multiplies_by_count() -> bool:
    """Say whether a factor of it is a size, or a variable of two or more.

    An operator may get but the product, as in `rows * 0.01 * penalty`.
    """
    factors = _running_factors()
    if any(map(_is_size, factors)):
        return True
    return any(map(_is_count, _variables(factors)))


def divides_by_variable() -> bool:
    """Say whether a part of it is a quotient by anything but a number that is written there."""
    running = _running()
    parts = () if running is None else ast.walk(running)
    return any(
        isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Div)
        and not isinstance(each.right, ast.Constant)
        for each in parts
    )


def _running_factors() -> list[ast.expr]:
    running = _running()
    return [] if running is None else list(_factors(running))


def _variables(factors: list[ast.expr]) -> list[Any]:
    """Return the values of the factors that are names."""
    names = {each.id for each in factors if isinstance(each, ast.Name)}
    frame = next(frames_of_program(), None)
    if frame is None or not names:
        return []
    variables = dict(locals_of(frame))
    return [variables.get(name, frame.f_globals.get(name)) for name in names]


def _running() -> ast.expr | None:
    expression = Expression.current()
    frame = next(frames_of_program(), None)
    if expression is None or frame is None or frame.f_code is not expression.code:
        return None
    try:
        return ast.parse(expression.text().strip(), mode="eval").body
    except SyntaxError:  # not all of it is known
        return None


def _factors(product: ast.expr) -> Iterator[ast.expr]:
    match product:
        case ast.BinOp(left=left, right=right):
            yield from _factors(left)
            yield from _factors(right)
        case ast.Call(func=ast.Attribute(value=value, attr="mul" | "mul_"), args=[factor]):
            yield from _factors(value)
            yield from _factors(factor)
        case ast.Call(func=ast.Name("float" | "int"), args=[value]):
            yield from _factors(value)
        case _:
            yield product


def _is_size(factor: ast.expr) -> bool:
    match factor:
        case ast.Call(func=ast.Name("len")):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Attribute(attr=name):
            return name in _SIZES
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
    return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and value >= LEAST_COUNT
