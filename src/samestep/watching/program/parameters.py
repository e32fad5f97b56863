"""The parameters of functions, and what is given for them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

from samestep.watching.program.code_values import Value
from samestep.watching.program.source_code import Function

__all__ = ["by_name", "defaults_of", "positional_names", "switches_of"]

T = TypeVar("T")


def positional_names(function: Any) -> list[str]:
    """Return the names of parameters that may be given by position; none if a function is not in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None) if isinstance(function, FunctionType) else None
    return [] if code is None else list(code.co_varnames[: code.co_argcount])


def by_name(names: Sequence[str], arguments: Sequence[T], named: Mapping[str, T]) -> dict[str, T]:
    """Return arguments by their names; without those by position for which there is none."""
    return {**dict(zip(names, arguments, strict=False)), **named}


def defaults_of(function: FunctionType) -> Mapping[str, Value]:
    """Return the values of parameters that are not given."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    found = {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: Value.of(value, name) for name, value in found.items()}


def switches_of(node: Function, given: Mapping[str, Value]) -> list[tuple[str, bool]]:
    """Return parameters that are True or False, such as by default, and that the function does not set."""
    found = {name: value.object for name, value in given.items() if not value.sources}
    switches = [(name, value) for name, value in found.items() if isinstance(value, bool)]
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name)) if switches else ()
    set_names = {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return [(name, value) for name, value in switches if name not in set_names]
