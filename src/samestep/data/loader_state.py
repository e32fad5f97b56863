"""The numbers in a loader's state, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.arguments import check_kind, whole
from samestep.errors import ConfigError, shown
from samestep.identity import check_same

__all__ = ["check_state", "number_in", "numbers_in"]

_REMEDY = "as state_dict() of the same kind of loader returns it"


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse what is no state, or from a run with other settings."""
    check_kind("the state of a loader", state, Mapping, "what its state_dict() returned")
    check_same(state, settings, "loader")


def number_in(state: Mapping[str, Any], name: str) -> int:
    """Return a count."""
    return whole(f"the state of loader: {name}", state.get(name), 0, _REMEDY)


def numbers_in(state: Mapping[str, Any], name: str, count: int) -> tuple[int, ...] | None:
    """Return some numbers, or None if the state has none."""
    value = state.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ConfigError(
            f"the state of loader: {name} = {shown(value)}: expected {count} numbers or None, {_REMEDY}"
        )
    return tuple(whole(f"the state of loader: {name}", each, None, _REMEDY) for each in value)
