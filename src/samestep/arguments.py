"""Checks of arguments: a wrong type or value is a `ConfigError` of one line, before anything else happens."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from samestep.errors import ConfigError, shown

__all__ = ["check_callable", "check_kind", "check_switch", "parameters_of", "positive", "whole"]


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise a `ConfigError` unless the argument is an instance of one of the types.

    >>> check_kind("towers", 8, str, "the samestep.Towers of the model")
    Traceback (most recent call last):
    samestep.errors.ConfigError: towers is a int: expected the samestep.Towers of the model
    """
    if not isinstance(value, kinds):
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise ConfigError(f"{name} is {what}: expected {expected}")


def check_callable(name: str, value: object, expected: str) -> None:
    """Raise a `ConfigError` unless the argument can be called."""
    if not callable(value):
        raise ConfigError(f"{name} is a {type(value).__name__}: expected {expected}")


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; annotations may name what only type checkers import.

    Raises:
        ValueError: Python knows no signature of it.
    """
    if sys.version_info >= (3, 14):  # which would evaluate them
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING).parameters
    return inspect.signature(function).parameters


def check_switch(name: str, value: object) -> None:
    """Raise a `ConfigError` unless the argument is a bool: any text, "no" included, would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {shown(value)}: expected True or False")


def whole(name: str, value: Any, low: int | None = None, meaning: str = "") -> int:
    """Return an argument as an int.

    Raises:
        ConfigError: it is something else, or below `low`.

    >>> whole("towers", 2.5, 1)
    Traceback (most recent call last):
    samestep.errors.ConfigError: towers = 2.5: expected an int >= 1
    """
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (low is not None and value < low):
        least = "" if low is None else f" >= {low}"
        raise ConfigError(f"{name} = {shown(value)}: expected an int{least}{', ' * bool(meaning)}{meaning}")
    return int(value)


def positive(name: str, value: Any, meaning: str) -> float:
    """Return an argument as a float.

    Raises:
        ConfigError: it is something else than a finite number above 0.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} = {shown(value)}: expected a number above 0, {meaning}")
    return float(value)
