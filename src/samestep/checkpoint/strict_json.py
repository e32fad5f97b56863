"""JSON as its standard has it, for files that anybody may have changed."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from samestep.errors import shown

__all__ = ["parse_json"]


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is none; or a name stands twice in an object, it holds NaN or an infinity, it is
            nested too deeply, or a number has too many digits.

    Example:
        >>> parse_json(b'{"step": 1, "step": 2}')
        Traceback (most recent call last):
        ValueError: 'step' stands twice in an object
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_once_each, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} stands twice in an object")
        values[name] = value
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
